"""The state's side of the Hopper kernel, in Gluon: checkpoint tiles and committed records under vector gates."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from replayssm.gdn.sm90_tiles import dot_tf32x3, from_fragment_columns, split2, split3, to_fragment_columns
from replayssm.gdn.sm90_window import BK
from replayssm.kda.sm90_window import log_gate


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def load_record_rows(p, row, K: gl.constexpr, SEQ: gl.constexpr):
    """Ring rows `row` [J] as a tile [J, K] whose columns lie each in one thread's registers."""
    o_k = gl.arange(0, K, gl.SliceLayout(0, SEQ))
    return gl.load(p + row[:, None] * K + o_k[None, :])


@gluon.jit
def fold_keys(folded, sums, keys, norm_j, logits, first, bias, neg_exp_a, lower_bound, valid, BOUNDED: gl.constexpr):
    """Bring the committed keys [J, K] to the window's start: `folded` in shared memory becomes e^(G_m - G_j) k_j.

    `logits` are those of the row behind each record and `first` [K] the oldest record's own, so that the exponents are
    sums from the newest record back. `sums` in shared memory becomes G_m [K].
    """
    J: gl.constexpr = keys.shape[0]
    SEQ: gl.constexpr = keys.type.layout
    o_j = gl.arange(0, J, gl.SliceLayout(1, SEQ))
    g = log_gate(logits, bias[None, :], neg_exp_a, lower_bound, BOUNDED)
    g = gl.where((o_j + 1 < valid)[:, None], g, 0.0)
    after = gl.associative_scan(g, 0, _add, reverse=True)
    oldest = gl.sum(gl.where((o_j == 0)[:, None], after, 0.0), 0)
    own = log_gate(first, bias, neg_exp_a, lower_bound, BOUNDED)
    sums.store(gl.where(valid > 0, oldest + own, 0.0))
    rows = keys.to(gl.float32) * gl.exp(after) * norm_j[:, None]
    folded.store(gl.where((o_j < valid)[:, None], rows, 0.0))


@gluon.jit
def project_keys(folded, x, MMA: gl.constexpr):
    """Folded keys times window rows: [J, N] from `folded` [J, K] and K / BK decayed window tiles x [N, BK]."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    J: gl.constexpr = folded.shape[0]
    N: gl.constexpr = x[0].shape[0]
    acc = gl.zeros([J, N], gl.float32, MMA)
    for c in gl.static_range(len(x)):
        rows = folded.slice(c * BK, BK, dim=1).load(A)
        acc = dot_tf32x3(rows, gl.convert_layout(gl.permute(x[c], [1, 0]), B), acc)
    return gl.convert_layout(acc, B)


@gluon.jit
def project_checkpoint(tiles, ready, x, BV: gl.constexpr, EXACT: gl.constexpr, MMA: gl.constexpr):
    """S0 x as its tiles land: [BV, N]. Tiles and the decayed window rows x [N, BK] are split into bf16 parts."""
    N: gl.constexpr = x[0].shape[0]
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    acc = gl.zeros([BV, N], gl.float32, MMA)
    rest = gl.zeros([BV, N], gl.float32, MMA)
    for c in gl.static_range(len(x)):
        columns = gl.convert_layout(gl.permute(x[c], [1, 0]), B)
        if EXACT:
            x0, x1, x2 = split3(columns)
        else:
            x0, x1 = split2(columns)
        mbarrier.wait(ready.index(c), 0)
        tile = tiles.index(c).reshape([BV, BK])
        if tile.dtype == gl.bfloat16:
            s0 = tile.load(A)
        elif EXACT:
            s0, s1, s2 = split3(tile.load(A))
            rest = mma_v2(s2, x0, rest)
            rest = mma_v2(s1, x1, rest)
            rest = mma_v2(s1, x0, rest)
        else:
            s0, s1 = split2(tile.load(A))
            rest = mma_v2(s1, x0, rest)
        if EXACT:
            rest = mma_v2(s0, x2, rest)
        rest = mma_v2(s0, x1, rest)
        acc = mma_v2(s0, x0, acc)
    return acc + rest


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
            decay = gl.exp(sums.slice(c * BK + half * 32, 32).load(gl.SliceLayout(0, WIDE)))
            b_s = tiles.index(c).reshape([BV, BK]).slice(half * 32, 32, dim=1).load(WIDE).to(gl.float32)
            # tensor cores truncate their sums, which would be a decay of its own; this one rounds to nearest
            b_s = b_s * decay[None, :] + update
            gl.store(p_tile + o_v[:, None] * K + (c * BK + half * 32 + o_k)[None, :], b_s.to(p_tile.dtype.element_ty))
