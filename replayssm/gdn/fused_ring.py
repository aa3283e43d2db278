"""The state's side of the fused kernel, in Gluon: cursors, checkpoint tiles and committed records."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from replayssm import cursor
from replayssm.gdn.fused_tiles import (
    dot_tf32x3,
    from_fragment_columns,
    split3,
    split_tf32,
    to_fragment_columns,
    wrap,
)
from replayssm.gdn.fused_window import BK

CURSOR_COLUMNS = gl.constexpr(cursor.CURSOR_COLUMNS)
SLOT, VALID, READ_ROW = gl.constexpr(cursor.SLOT), gl.constexpr(cursor.VALID), gl.constexpr(cursor.READ_ROW)
WRITE_ROW, LENGTH, FLUSH = gl.constexpr(cursor.WRITE_ROW), gl.constexpr(cursor.LENGTH), gl.constexpr(cursor.FLUSH)

barrier = getattr(gl, 'barrier', None) or gl.thread_barrier
"""Its name until Triton 3.6 was the second."""


@gluon.jit
def load_cursor(cursors, i_b):
    p_cursor = cursors + i_b * CURSOR_COLUMNS
    slot, valid, read_row = gl.load(p_cursor + SLOT), gl.load(p_cursor + VALID), gl.load(p_cursor + READ_ROW)
    write_row, length, flush = gl.load(p_cursor + WRITE_ROW), gl.load(p_cursor + LENGTH), gl.load(p_cursor + FLUSH)
    return slot, valid, read_row, write_row, length, flush


@gluon.jit
def make_ready(desc, NC: gl.constexpr):
    """A barrier for every box of a tile and one on which nothing arrives; None without a descriptor: cp.async."""
    ready = None
    if desc is not None:
        ready = gl.allocate_shared_memory(gl.int64, [NC + 1, 1], mbarrier.MBarrierLayout())
        for c in gl.static_range(NC + 1):
            mbarrier.init(ready.index(c), count=1)
    return ready


@gluon.jit
def request_tile(desc, p_tile, tiles, ready, slot, i_row, BV: gl.constexpr, K: gl.constexpr):
    """Start the copy of checkpoint rows i_row.., which lie at `p_tile`, into `tiles`, BK columns a box."""
    NC: gl.constexpr = K // BK
    NBYTES: gl.constexpr = BV * BK * p_tile.dtype.element_ty.primitive_bitwidth // 8
    if ready is not None:
        for c in gl.static_range(NC):
            mbarrier.expect(ready.index(c), NBYTES)
            tma.async_copy_global_to_shared(desc, [slot, i_row, c * BK], ready.index(c), tiles.index(c))
        # Nothing ever arrives here and phase 1 is open. The wait ends the basic block: without it ptxas puts the first
        # use of a load before the last load is issued.
        mbarrier.wait(ready.index(NC), 1)
    else:
        WIDTH: gl.constexpr = 128 // p_tile.dtype.element_ty.primitive_bitwidth
        WIDE: gl.constexpr = gl.BlockedLayout([1, WIDTH], [WIDTH // 2, 64 // WIDTH], [gl.num_warps(), 1], [1, 0])
        o_v = gl.arange(0, BV, gl.SliceLayout(1, WIDE))
        o_k = gl.arange(0, BK, gl.SliceLayout(0, WIDE))
        for c in gl.static_range(NC):
            box = tiles.index(c).reshape([BV, BK])
            async_copy.async_copy_global_to_shared(box, p_tile + o_v[:, None] * K + (c * BK + o_k)[None, :])
            async_copy.commit_group()
        barrier()


@gluon.jit
def await_box(ready, c: gl.constexpr, NC: gl.constexpr):
    """Wait until box c of a tile of NC has landed."""
    if ready is not None:
        mbarrier.wait(ready.index(c), 0)
    else:
        async_copy.wait_group(NC - 1 - c)


@gluon.jit
def invalidate(ready, NC: gl.constexpr):
    """Keep the barriers' memory theirs until here.

    The compiler reuses what is no longer read as scratch, and data written over a barrier that was not invalidated
    comes back with words changed.
    """
    if ready is not None:
        for c in gl.static_range(NC + 1):
            mbarrier.invalidate(ready.index(c))


@gluon.jit
def load_keys(p_key, read_row, last, K: gl.constexpr, R: gl.constexpr, J: gl.constexpr, X: gl.constexpr):
    """Keys of the committed rows as K / BK B operands [BK, J]."""
    o_j = wrap(read_row + gl.minimum(gl.arange(0, J, gl.SliceLayout(0, X)), last), R)
    o_k = gl.arange(0, BK, gl.SliceLayout(1, X))
    keys = ()
    for c in gl.static_range(K // BK):
        keys = keys + (gl.load(p_key + o_j[None, :] * K + (c * BK + o_k)[:, None]),)
    return keys


@gluon.jit
def load_key_rows(p_key, read_row, last, wanted, K: gl.constexpr, R: gl.constexpr, J: gl.constexpr):
    """Keys of the committed rows as K / BK tiles [J, BK], 16 bytes a thread; zeros unless `wanted`."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    i_j = gl.arange(0, J, gl.SliceLayout(1, WIDE))
    o_j = wrap(read_row + gl.minimum(i_j, last), R)
    o_k = gl.arange(0, BK, gl.SliceLayout(0, WIDE))
    mask = ((i_j >= 0) & wanted)[:, None] & (o_k >= 0)[None, :]
    keys = ()
    for c in gl.static_range(K // BK):
        keys = keys + (gl.load(p_key + o_j[:, None] * K + (c * BK + o_k)[None, :], mask=mask, other=0.0),)
    return keys


@gluon.jit
def load_deltas(
    p_delta, read_row, last, R: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, J: gl.constexpr, A: gl.constexpr
):
    """Records d of the committed rows: fp32 as the A operand [BV, J], bf16 as [J, BV] in 16-byte pieces."""
    if p_delta.dtype.element_ty == gl.bfloat16:
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [gl.num_warps(), 1], [1, 0])
        o_j = gl.minimum(gl.arange(0, J, gl.SliceLayout(1, WIDE)), last)
        o_v = gl.arange(0, BV, gl.SliceLayout(0, WIDE))
        b_d = gl.load(p_delta + wrap(read_row + o_j, R)[:, None] * V + o_v[None, :])
    else:
        o_v = gl.arange(0, BV, gl.SliceLayout(1, A))
        o_j = gl.minimum(gl.arange(0, J, gl.SliceLayout(0, A)), last)
        b_d = gl.load(p_delta + wrap(read_row + o_j, R)[None, :] * V + o_v[:, None])
    return b_d


@gluon.jit
def project_records(b_d, b_c, valid, mask, MMA: gl.constexpr):
    """sum_j d_j c_nj over the committed records: [BV, N], from d [BV, J] and c [N, J]."""
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    # an accumulator's columns are a B operand's rows in the same registers
    c = gl.convert_layout(gl.permute(b_c, [1, 0]), B, assert_trivial=True)
    acc = gl.zeros([b_d.shape[0], c.shape[1]], gl.float32, MMA)
    if b_d.dtype == gl.bfloat16:
        c0, c1, c2 = split3(c)
        acc = mma_v2(b_d, c0, mma_v2(b_d, c1, mma_v2(b_d, c2, acc)))
    else:
        acc = dot_tf32x3(b_d, c, acc, mask)
    # without a committed record the rows read were dead, and may hold NaN
    return gl.where(valid > 0, acc, 0.0)


@gluon.jit
def project_checkpoint(tiles, ready, x, mask, BV: gl.constexpr, MMA: gl.constexpr):
    """S0 x as its tiles land: [BV, N]. fp32 tiles are split into tf32 parts in registers; x is exact as it is."""
    N: gl.constexpr = x[0].shape[1]
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    acc = gl.zeros([BV, N], gl.float32, MMA)
    rest = gl.zeros([BV, N], gl.float32, MMA)
    for c in gl.static_range(len(x)):
        await_box(ready, c, len(x))
        tile = tiles.index(c).reshape([BV, BK])
        if tile.dtype == gl.bfloat16:
            acc = mma_v2(tile.load(A), x[c], acc)
        else:
            # 32 columns at a time: splitting all 64 at once took 172 registers, too many for six programs an SM
            halves = gl.split(gl.permute(x[c].reshape([2, 32, N]), [1, 2, 0]))
            for half in gl.static_range(2):
                s_head, s_rest = split_tf32(tile.slice(half * 32, 32, dim=1).load(A), mask)
                b_x = gl.convert_layout(halves[half], B, assert_trivial=True).to(gl.float32)
                acc = mma_v2(s_head, b_x, acc, input_precision='tf32')
                rest = mma_v2(s_rest, b_x, rest, input_precision='tf32')
    return acc + rest


@gluon.jit
def fold(tiles, p_tile, keys, b_d, decay_j, gate_sum, MMA: gl.constexpr):
    """Write e^G S0 + sum_j e^(G - G_j) d_j k_j^T over a checkpoint tile.

    `keys` are raw, [J, BK] each; `decay_j` is e^(G - G_j) / |k_j|, zero for dead rows.
    """
    BV: gl.constexpr = b_d.shape[0]
    J: gl.constexpr = b_d.shape[1]
    K: gl.constexpr = len(keys) * BK
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WIDE: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    d0, d1, d2 = split3(b_d.to(gl.float32) * gl.convert_layout(decay_j, gl.SliceLayout(0, A))[None, :])
    decay = gl.exp(gate_sum)
    o_v = gl.arange(0, BV, gl.SliceLayout(1, WIDE))
    o_k = gl.arange(0, 32, gl.SliceLayout(0, WIDE))
    for c in gl.static_range(len(keys)):
        b_key = gl.convert_layout(to_fragment_columns(keys[c]), B)
        halves = gl.split(gl.permute(b_key.reshape([J, 2, 32]), [0, 2, 1]))
        for half in gl.static_range(2):
            b_k = gl.convert_layout(halves[half], B, assert_trivial=True)
            update = gl.zeros([BV, 32], gl.float32, MMA)
            update = mma_v2(d0, b_k, mma_v2(d1, b_k, mma_v2(d2, b_k, update)))
            update = gl.convert_layout(from_fragment_columns(update), WIDE, assert_trivial=True)
            b_s = tiles.index(c).reshape([BV, BK]).slice(half * 32, 32, dim=1).load(WIDE).to(gl.float32)
            # tensor cores truncate their sums, which would be a decay of its own; this one rounds to nearest
            b_s = b_s * decay + update
            p_s = p_tile + o_v[:, None] * K + (c * BK + half * 32 + o_k)[None, :]
            gl.store(p_s, b_s.to(p_tile.dtype.element_ty))
