"""The window's side of the Hopper kernel, in Gluon: what the tokens of one step do to each other.

Columns n of every factor are the window's tokens twice, keys in 0..T-1 and queries in T..2T-1, padded to N.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.gdn import reference
from replayssm.gdn.fused_tiles import as_rows, column, log_gate, sigmoid, top_rows, wrap

BK = gl.constexpr(64)
"""Columns of K that travel together: one TMA box of the checkpoint, one register tile of keys and queries."""
NORM_EPS = gl.constexpr(reference.NORM_EPS)


@gluon.jit
def token_of(o_n, T: gl.constexpr):
    """Token of column n; columns past 2 T repeat the last one."""
    return gl.minimum(gl.where(o_n >= T, o_n - T, o_n), T - 1)


@gluon.jit
def load_window(p_q, p_k, stride_qt, stride_kt, T: gl.constexpr, N: gl.constexpr, K: gl.constexpr, X: gl.constexpr):
    """Raw keys and queries of one head as K / BK B operands [BK, N]."""
    o_k = gl.arange(0, BK, gl.SliceLayout(1, X))
    o_n = gl.arange(0, N, gl.SliceLayout(0, X))
    i_t = token_of(o_n, T)
    p_key = p_k + (i_t * stride_kt)[None, :] + o_k[:, None]
    p_query = p_q + (i_t * stride_qt)[None, :] + o_k[:, None]
    p_x = gl.where((o_n < T)[None, :], p_key, p_query)
    x = ()
    for c in gl.static_range(K // BK):
        x = x + (gl.load(p_x + c * BK),)
    return x


@gluon.jit
def load_logits(p_logit, stride_t, o_r, o_c, T: gl.constexpr):
    """A raw gate or beta logit of every token, by rows and by columns of an [N, N] factor."""
    return gl.load(p_logit + token_of(o_r, T) * stride_t), gl.load(p_logit + token_of(o_c, T) * stride_t)


@gluon.jit
def load_values(p_v, stride_vt, BV: gl.constexpr, T: gl.constexpr, ROW: gl.constexpr):
    o_v = gl.arange(0, BV, ROW)
    values = ()
    for i in gl.static_range(T):
        values = values + (gl.load(p_v + i * stride_vt + o_v),)
    return values


@gluon.jit
def store_keys(p_key, x, write_row, length, T: gl.constexpr, R: gl.constexpr, X: gl.constexpr):
    """Append the window's raw keys to the ring, rows behind `length` left out."""
    NC: gl.constexpr = len(x)
    o_k = gl.arange(0, BK, gl.SliceLayout(1, X))
    o_n = gl.arange(0, x[0].shape[1], gl.SliceLayout(0, X))
    p_new = p_key + wrap(write_row + token_of(o_n, T), R)[None, :] * (NC * BK) + o_k[:, None]
    mask_new = (o_n < length)[None, :] & (o_k >= 0)[:, None]
    for c in gl.static_range(NC):
        gl.store(p_new + c * BK, x[c], mask=mask_new)


@gluon.jit
def gram(x, ring_keys, MMA: gl.constexpr):
    """x^T x [N, N] and x^T k [N, J] with the ring's keys; both exact up to fp32 sums, for nothing is normalised yet."""
    N: gl.constexpr = x[0].shape[1]
    J: gl.constexpr = ring_keys[0].shape[1]
    xx = gl.zeros([16, N], gl.float32, MMA)
    xk = gl.zeros([16, J], gl.float32, MMA)
    for c in gl.static_range(len(x)):
        rows = gl.convert_layout(as_rows(x[c]), gl.DotOperandLayout(0, MMA, 8), assert_trivial=True)
        xx = mma_v2(rows, x[c], xx)
        xk = mma_v2(rows, ring_keys[c], xk)
    return top_rows(xx, N), top_rows(xk, N)


@gluon.jit
def window_gates(a_r, a_c, neg_exp_a, dt_bias, o_r, o_c, T: gl.constexpr):
    """Sums of the window's gates up to each token, by rows and by columns of an [N, N] factor."""
    g_r = log_gate(a_r.to(gl.float32) + dt_bias, neg_exp_a)
    g_c = log_gate(a_c.to(gl.float32) + dt_bias, neg_exp_a)
    until_r = (o_c < T)[None, :] & (o_c[None, :] <= token_of(o_r, T)[:, None])
    until_c = (o_r < T)[:, None] & (o_r[:, None] <= token_of(o_c, T)[None, :])
    return gl.sum(gl.where(until_r, g_c[None, :], 0.0), 1), gl.sum(gl.where(until_c, g_r[:, None], 0.0), 0)


@gluon.jit
def window_factors(xx, b_r, b_c, gate_r, gate_c, o_r, o_c, scale, T: gl.constexpr):
    """What d_i of token i adds to column n: e^(G_n - G_i) k_i . x_n with the norms, and beta or scale of column n.

    Returns the factors [N, N], whose free diagonal carries beta_i, the inverse norms by rows, and the full scale of a
    column by rows and by columns.
    """
    beta_r = sigmoid(b_r.to(gl.float32))
    diagonal = o_r[:, None] == o_c[None, :]
    square = gl.where(diagonal, xx, 0.0)
    norm_r = gl.rsqrt(gl.sum(square, 1) + NORM_EPS)
    norm_c = gl.rsqrt(gl.sum(square, 0) + NORM_EPS)
    scale_r = norm_r * gl.where(o_r < T, beta_r, scale)
    scale_c = norm_c * gl.where(o_c < T, sigmoid(b_c.to(gl.float32)), scale)
    reached = (o_r < T)[:, None] & (o_r[:, None] <= token_of(o_c, T)[None, :])
    decay = gl.exp(gl.minimum(gate_c[None, :] - gate_r[:, None], 0.0))
    factors = gl.where(reached, xx * decay * norm_r[:, None] * scale_c[None, :], 0.0)
    return gl.where(diagonal, beta_r[:, None], factors), norm_r, scale_r, scale_c


@gluon.jit
def solve_window(
    y,
    b_v,
    factors,
    p_out,
    p_delta,
    write_row,
    length,
    stride_ot,
    T: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Forward substitution: d_i = beta_i v_i - y_i, then y_n += f_in d_i for the columns that token i reaches.

    Column i of y [BV, N] starts as beta_i S k_i, column T + i as S q_i; the latter ends as output i. `factors` is
    `window_factors`' result in shared memory, row by row.
    """
    N: gl.constexpr = y.shape[1]
    ROW: gl.constexpr = gl.SliceLayout(1, ROWS)
    o_v = gl.arange(0, y.shape[0], ROW)
    for i in gl.static_range(T):
        inside = i < length
        f = factors.slice(i * N, N).load(gl.SliceLayout(0, ROWS))
        b_f, _ = gl.broadcast(f[None, :], y)
        d = gl.convert_layout(column(b_f, i), ROW) * b_v[i].to(gl.float32) - gl.convert_layout(column(y, i), ROW)
        y += d[:, None] * b_f
        o = gl.where(inside, gl.convert_layout(column(y, T + i), ROW), 0.0)
        gl.store(p_out + i * stride_ot + o_v, o.to(p_out.dtype.element_ty))
        p_d = p_delta + wrap(write_row + i, R) * V + o_v
        gl.store(p_d, d.to(p_delta.dtype.element_ty), mask=(o_v >= 0) & inside)
