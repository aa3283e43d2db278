"""The window's side of the Hopper kernel, in Gluon: tokens of one step under vector gates.

Rows n of a window tile are the window's tokens twice, keys in 0..T-1 and queries in T..2T-1, padded to N. With a gate
per channel every product needs exponentials of whole rows, so tiles [N, BK] are spread over all threads of a program
(layout WIN) and handed to the tensor cores through shared memory; in the fragments' own layouts every warp would repeat
the exponentials of all the others.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.gdn.fused_tiles import log_gate as softplus_gate
from replayssm.gdn.fused_tiles import split3, wrap
from replayssm.gdn.fused_window import BK, NORM_EPS, token_of


@gluon.jit
def exp2(x):
    """2^x in one instruction, within 2^-22; gl.exp spends four more on results that are subnormal."""
    return gl.inline_asm_elementwise('ex2.approx.ftz.f32 $0, $1;', '=r,r', [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise('rcp.approx.ftz.f32 $0, $1;', '=r,r', [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2_gate(a, bias, rate, lower_bound, BOUNDED: gl.constexpr):
    """Base-2 logarithms of the gates of raw logits, `reference.gates`; `rate` and `lower_bound` times log2 e."""
    x = a.to(gl.float32) + bias
    if BOUNDED:
        g = lower_bound * _reciprocal(1.0 + exp2(rate * x))
    else:
        g = softplus_gate(x, rate)
    return g


@gluon.jit
def load_rows(p_q, p_k, stride_qt, stride_kt, T: gl.constexpr, N: gl.constexpr, NC: gl.constexpr, WIN: gl.constexpr):
    """Raw keys and queries of one head as NC window tiles [N, BK]."""
    o_n = gl.arange(0, N, gl.SliceLayout(1, WIN))
    o_k = gl.arange(0, BK, gl.SliceLayout(0, WIN))
    i_t = token_of(o_n, T)
    p_key = p_k + (i_t * stride_kt)[:, None] + o_k[None, :]
    p_query = p_q + (i_t * stride_qt)[:, None] + o_k[None, :]
    p_x = gl.where((o_n < T)[:, None], p_key, p_query)
    x = ()
    for c in gl.static_range(NC):
        x = x + (gl.load(p_x + c * BK),)
    return x


@gluon.jit
def load_vectors(p, stride_t, T: gl.constexpr, NC: gl.constexpr, WIN: gl.constexpr):
    """Rows of K numbers, one a token, as T tuples of NC vectors [BK]."""
    o_k = gl.arange(0, BK, gl.SliceLayout(0, WIN))
    rows = ()
    for i in gl.static_range(T):
        chunks = ()
        for c in gl.static_range(NC):
            chunks = chunks + (gl.load(p + i * stride_t + c * BK + o_k),)
        rows = rows + (chunks,)
    return rows


@gluon.jit
def window_gates(logits, c: gl.constexpr, bias, rate, lower_bound, o_n, T: gl.constexpr, BOUNDED: gl.constexpr):
    """Sums of the window's log2 gates on chunk c: T vectors [BK], and by rows of a window tile [N, BK]."""
    total = log2_gate(logits[0][c], bias, rate, lower_bound, BOUNDED)
    sums = (total,)
    rows, _ = gl.broadcast(total[None, :], o_n[:, None])
    for i in gl.static_range(1, T):
        total = total + log2_gate(logits[i][c], bias, rate, lower_bound, BOUNDED)
        sums = sums + (total,)
        rows = gl.where((token_of(o_n, T) >= i)[:, None], total[None, :], rows)
    return sums, rows


@gluon.jit
def window_products(raw, token, gate_n, gate_i, T: gl.constexpr):
    """x_n k_i e^(G_n - G_i) on a chunk, raw keys and queries [N, BK]; columns that token i does not reach are moot."""
    product = raw * token.to(gl.float32)[None, :]
    if T > 1:
        product = product * exp2(gl.minimum(gate_n - gate_i[None, :], 0.0))
    return product


@gluon.jit
def as_operand(x, B: gl.constexpr):
    """A window tile [N, BK] as the B operand [BK, N]."""
    return gl.convert_layout(gl.permute(x, [1, 0]), B)


@gluon.jit
def bf16_operands(x, B: gl.constexpr):
    """A window tile [N, BK] as three bf16 B operands [BK, N] whose sum it is.

    Splitting comes first: before it is copied to every warp there is a quarter of it in a thread.
    """
    x0, x1, x2 = split3(x)
    return as_operand(x0, B), as_operand(x1, B), as_operand(x2, B)


@gluon.jit
def inverse_norms(x, WIN: gl.constexpr):
    """1 / |x_n| of every row: [N]."""
    square = gl.zeros([x[0].shape[0], BK], gl.float32, WIN)
    for c in gl.static_range(len(x)):
        row = x[c].to(gl.float32)
        square += row * row
    return gl.rsqrt(gl.sum(square, 1) + NORM_EPS)


@gluon.jit
def store_factors(factors, products, norm_n, scale_n, betas, o_n, T: gl.constexpr):
    """What d_i adds to column n, `gdn.fused_window.window_factors`' result, row by row into shared memory.

    `products` are T tiles [N, BK] that sum along BK to k_i . x_n e^(G_n - G_i), of raw keys and queries.
    """
    N: gl.constexpr = o_n.shape[0]
    for i in gl.static_range(T):
        norm = gl.sum(gl.where(o_n == i, norm_n, 0.0), 0)
        row = gl.where(token_of(o_n, T) >= i, gl.sum(products[i], 1) * norm * scale_n, 0.0)
        factors.slice(i * N, N).store(gl.where(o_n == i, betas[i], row))


@gluon.jit
def store_window(p_key, p_key_norm, x, norm_n, write_row, length, T: gl.constexpr, R: gl.constexpr, WIN: gl.constexpr):
    """Append the window's raw keys and their inverse norms to the ring, rows behind `length` left out."""
    NC: gl.constexpr = len(x)
    o_n = gl.arange(0, x[0].shape[0], gl.SliceLayout(1, WIN))
    o_k = gl.arange(0, BK, gl.SliceLayout(0, WIN))
    o_w = wrap(write_row + token_of(o_n, T), R)
    gl.store(p_key_norm + o_w, norm_n, mask=o_n < length)
    mask_new = (o_n < length)[:, None] & (o_k >= 0)[None, :]
    for c in gl.static_range(NC):
        gl.store(p_key + o_w[:, None] * (NC * BK) + (c * BK + o_k)[None, :], x[c], mask=mask_new)


@gluon.jit
def store_logits(p_gate, logits, write_row, length, T: gl.constexpr, R: gl.constexpr, WIN: gl.constexpr):
    """Append the window's raw gate logits to the ring."""
    NC: gl.constexpr = len(logits[0])
    o_k = gl.arange(0, BK, gl.SliceLayout(0, WIN))
    for i in gl.static_range(T):
        p_row = p_gate + wrap(write_row + i, R) * (NC * BK) + o_k
        for c in gl.static_range(NC):
            gl.store(p_row + c * BK, logits[i][c], mask=(o_k >= 0) & (i < length))
