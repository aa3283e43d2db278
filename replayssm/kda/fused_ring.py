"""The state's side of the fused kernel, in Gluon: checkpoint tiles and committed records under vector gates."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.gdn.fused_ring import await_box
from replayssm.gdn.fused_tiles import dot_tf32x3, from_fragment_columns, split3, split_tf32, to_fragment_columns, wrap
from replayssm.gdn.fused_window import BK
from replayssm.kda.fused_window import as_operand, bf16_operands, exp2, log2_gate


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def load_record_rows(p, row, K: gl.constexpr, SEQ: gl.constexpr):
    """Ring rows `row` [J] as a tile [J, K]."""
    o_k = gl.arange(0, K, gl.SliceLayout(0, SEQ))
    return gl.load(p + row[:, None] * K + o_k[None, :])


@gluon.jit
def load_deltas(
    p_delta, read_row, last, R: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, J: gl.constexpr, A: gl.constexpr
):
    """Records d, the newest first: fp32 as the A operand [BV, J], bf16 as [J, BV] in 16-byte pieces."""
    if p_delta.dtype.element_ty == gl.bfloat16:
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [gl.num_warps(), 1], [1, 0])
        row = newest_first(gl.arange(0, J, gl.SliceLayout(1, WIDE)), read_row, last, R)
        o_v = gl.arange(0, BV, gl.SliceLayout(0, WIDE))
        b_d = gl.load(p_delta + row[:, None] * V + o_v[None, :])
    else:
        o_v = gl.arange(0, BV, gl.SliceLayout(1, A))
        row = newest_first(gl.arange(0, J, gl.SliceLayout(0, A)), read_row, last, R)
        b_d = gl.load(p_delta + row[None, :] * V + o_v[:, None])
    return b_d


@gluon.jit
def newest_first(o_j, read_row, last, R: gl.constexpr):
    """Ring row of the j-th newest record; past the oldest it is the oldest again, whose weight there is zero."""
    return wrap(read_row + gl.maximum(last - o_j, 0), R)


@gluon.jit
def fold_keys(keys, norm_j, logits, first, bias, rate, lower_bound, valid, BOUNDED: gl.constexpr):
    """Bring the committed keys [J, K], the newest first, to the window's start: e^(G_m - G_j) k_j; and log2 e^G_m [K].

    `logits` are those of the next newer record and `first` [K] the oldest record's own, so that the exponents are sums
    from the newest record back, as prefix sums: a reverse scan would shuffle every number ten times.
    """
    J: gl.constexpr = keys.shape[0]
    SEQ: gl.constexpr = keys.type.layout
    o_j = gl.arange(0, J, gl.SliceLayout(1, SEQ))
    g = log2_gate(logits, bias[None, :], rate, lower_bound, BOUNDED)
    g = gl.where(((o_j > 0) & (o_j < valid))[:, None], g, 0.0)
    after = gl.associative_scan(g, 0, _add)
    own = log2_gate(first, bias, rate, lower_bound, BOUNDED)
    whole = gl.where(valid > 0, gl.sum(g, 0) + own, 0.0)
    rows = keys.to(gl.float32) * exp2(after) * norm_j[:, None]
    return gl.where((o_j < valid)[:, None], rows, 0.0), whole


@gluon.jit
def token_weights(rows, columns, scale_n, MMA: gl.constexpr):
    """Folded keys `rows` [J, K] times a single token's key and query, as the B operand [J, N] of the records.

    Two columns are too few for tensor cores that every warp would feed by itself, so that the products are formed in
    registers, where the keys are. `columns` [K] are decayed but not normalised.
    """
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    J: gl.constexpr = rows.shape[0]
    N: gl.constexpr = scale_n.shape[0]
    weights = gl.allocate_shared_memory(gl.float32, [J, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for n in gl.static_range(2):
        weights.slice(n, 1, dim=1).store(gl.sum(rows * columns[n][None, :], 1)[:, None])
    return weights.load(B) * gl.convert_layout(scale_n, gl.SliceLayout(0, B))[None, :]


@gluon.jit
def window_weights(folded, x, mask, MMA: gl.constexpr):
    """Folded keys [J, K] in shared memory times K / BK window tiles x [N, BK], as the records' B operand [J, N]."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    J: gl.constexpr = folded.shape[0]
    N: gl.constexpr = x[0].shape[0]
    acc = gl.zeros([J, N], gl.float32, MMA)
    for c in gl.static_range(len(x)):
        keys = folded.slice(c * BK, BK, dim=1).load(A)
        acc = dot_tf32x3(keys, as_operand(x[c], B), acc, mask)
    return gl.convert_layout(acc, B)


@gluon.jit
def project_checkpoint(tiles, ready, x, mask, BV: gl.constexpr, MMA: gl.constexpr):
    """S0 x as its tiles land: [BV, N], from window tiles x [N, BK].

    32 columns at a time, since the parts of 64 would leave registers for two programs an SM instead of three.
    """
    N: gl.constexpr = x[0].shape[0]
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    acc = gl.zeros([BV, N], gl.float32, MMA)
    rest = gl.zeros([BV, N], gl.float32, MMA)
    for c in gl.static_range(len(x)):
        if tiles.dtype == gl.bfloat16:
            parts = bf16_operands(x[c], B)
        else:
            b_x = as_operand(x[c], B)
        await_box(ready, c, len(x))
        for half in gl.static_range(2):
            b_s = tiles.index(c).reshape([BV, BK]).slice(half * 32, 32, dim=1).load(A)
            if b_s.dtype == gl.bfloat16:
                acc = mma_v2(b_s, _half(parts[0], half), acc)
                rest = mma_v2(b_s, _half(parts[1], half), mma_v2(b_s, _half(parts[2], half), rest))
            else:
                s_head, s_rest = split_tf32(b_s, mask)
                x_head, x_rest = split_tf32(_half(b_x, half), mask)
                acc = mma_v2(s_head, x_head, acc, input_precision='tf32')
                rest = mma_v2(s_rest, x_head, rest, input_precision='tf32')
                rest = mma_v2(s_head, x_rest, rest, input_precision='tf32')
    return acc + rest


@gluon.jit
def _half(x, half: gl.constexpr):
    """Rows 32 half.. of a B operand [64, N], in the same registers."""
    N: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = x.type.layout
    first, second = gl.split(gl.permute(x.reshape([2, 32, N]), [1, 2, 0]))
    if half:
        first = second
    return gl.convert_layout(first, LAYOUT, assert_trivial=True)


@gluon.jit
def fold(tiles, p_tile, folded, sums, b_d, MMA: gl.constexpr):
    """Write S0 diag(e^G) + sum_j d_j folded_j^T over a checkpoint tile."""
    BV: gl.constexpr = b_d.shape[0]
    K: gl.constexpr = folded.shape[1]
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WIDE: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_v = gl.arange(0, BV, gl.SliceLayout(1, WIDE))
    o_k = gl.arange(0, 32, gl.SliceLayout(0, WIDE))
    d0, d1, d2 = split3(b_d.to(gl.float32))
    for c in gl.static_range(K // BK):
        for half in gl.static_range(2):
            rows = to_fragment_columns(folded.slice(c * BK + half * 32, 32, dim=1).load(ROWS))
            k0, k1, k2 = split3(gl.convert_layout(rows, B))
            update = gl.zeros([BV, 32], gl.float32, MMA)
            if b_d.dtype != gl.bfloat16:
                update = mma_v2(d2, k0, mma_v2(d1, k1, mma_v2(d1, k0, update)))
            update = mma_v2(d0, k0, mma_v2(d0, k1, mma_v2(d0, k2, update)))
            update = gl.convert_layout(from_fragment_columns(update), WIDE, assert_trivial=True)
            decay = exp2(sums.slice(c * BK + half * 32, 32).load(gl.SliceLayout(0, WIDE)))
            b_s = tiles.index(c).reshape([BV, BK]).slice(half * 32, 32, dim=1).load(WIDE).to(gl.float32)
            # tensor cores truncate their sums, which would be a decay of its own; this one rounds to nearest
            b_s = b_s * decay[None, :] + update
            gl.store(p_tile + o_v[:, None] * K + (c * BK + half * 32 + o_k)[None, :], b_s.to(p_tile.dtype.element_ty))
