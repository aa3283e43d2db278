"""Decoding by replay on NVIDIA GPUs: one fused Gluon launch per layer. README.md has the equations.

A program takes BV state rows of one value head of one sequence. It asks for the records, and then for its checkpoint
tile. While that flies, the products of the window's raw keys and queries with themselves and with the ring's keys are
formed on tensor cores; norms, gates and decays multiply the small factors afterwards. Then the tile is projected on all
tokens of the window at once, and a forward substitution gives d and the outputs. A flushing row rewrites its tile in
place.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.gdn.fused_launch import Gpu, Tiling, constants, gpu_of, tile_descriptor
from replayssm.gdn.fused_ring import (
    fold,
    invalidate,
    load_cursor,
    load_deltas,
    load_key_rows,
    load_keys,
    make_ready,
    project_checkpoint,
    project_records,
    request_tile,
)
from replayssm.gdn.fused_tiles import tf32_mask, top_rows, wrap
from replayssm.gdn.fused_window import (
    BK,
    gram,
    load_logits,
    load_values,
    load_window,
    solve_window,
    store_keys,
    token_of,
    window_factors,
    window_gates,
)
from replayssm.gdn.operands import Dims
from replayssm.layout import LayerState


@gluon.jit
def _replay_kernel(
    desc,
    q,
    k,
    v,
    a,
    b,
    neg_exp_a,
    dt_bias,
    out,
    checkpoint,
    key,
    key_norm,
    delta,
    gate,
    cursors,
    scale,
    stride_qb,
    stride_qt,
    stride_kb,
    stride_kt,
    stride_vb,
    stride_vt,
    stride_ab,
    stride_at,
    stride_bb,
    stride_bt,
    slot_checkpoint,
    slot_key,
    slot_key_norm,
    slot_delta,
    slot_gate,
    T: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    R: gl.constexpr,
    BV: gl.constexpr,
    N: gl.constexpr,
    J: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
):
    NC: gl.constexpr = K // BK
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    FACTOR: gl.constexpr = top_rows(gl.zeros([16, N], gl.float32, MMA), N).type.layout
    RING: gl.constexpr = top_rows(gl.zeros([16, J], gl.float32, MMA), N).type.layout

    i_v = gl.program_id(0) * BV
    i_hv = gl.program_id(1)
    i_h = i_hv // (HV // H)
    i_b = gl.program_id(2).to(gl.int64)
    slot, valid, read_row, write_row, length, flush = load_cursor(cursors, i_b)

    tiles = gl.allocate_shared_memory(checkpoint.dtype.element_ty, [NC, 1, BV, BK], TILE)
    ready = make_ready(desc, NC)
    factors = gl.allocate_shared_memory(gl.float32, [N * N], gl.SwizzledSharedLayout(1, 1, 1, [0]))

    # loads that need no slot go before the branch, to fly together with the cursors
    x = load_window(q + i_b * stride_qb + i_h * K, k + i_b * stride_kb + i_h * K, stride_qt, stride_kt, T, N, K, X)
    o_r = gl.arange(0, N, gl.SliceLayout(1, FACTOR))
    o_c = gl.arange(0, N, gl.SliceLayout(0, FACTOR))
    a_r, a_c = load_logits(a + i_b * stride_ab + i_hv, stride_at, o_r, o_c, T)
    b_r, b_c = load_logits(b + i_b * stride_bb + i_hv, stride_bt, o_r, o_c, T)
    gate_scale, gate_bias = gl.load(neg_exp_a + i_hv), gl.load(dt_bias + i_hv).to(gl.float32)
    ROW: gl.constexpr = gl.SliceLayout(1, ROWS)
    b_v = load_values(v + i_b * stride_vb + i_hv * V + i_v, stride_vt, BV, T, ROW)
    p_out = out + (i_b * T * HV + i_hv) * V + i_v

    if slot >= 0:
        i_s = slot.to(gl.int64)
        p_key = key + i_s * slot_key + i_h * (R * K)
        p_key_norm = key_norm + i_s * slot_key_norm + i_h * R
        p_gate = gate + i_s * slot_gate + i_hv * R
        p_delta = delta + i_s * slot_delta + i_hv * (R * V) + i_v
        # a dead row repeats the newest live row's address under weight zero: no mask, no traffic, no NaN
        last = gl.maximum(valid, 1) - 1
        keys = load_keys(p_key, read_row, last, K, R, J, X)
        o_j = gl.arange(0, J, gl.SliceLayout(0, RING))
        row_j = wrap(read_row + gl.minimum(o_j, last), R)
        norm_j, gate_j = gl.load(p_key_norm + row_j), gl.load(p_gate + row_j)
        gate_sum = gl.load(p_gate + wrap(read_row + last, R))
        b_d = load_deltas(p_delta, read_row, last, R, V, BV, J, A)
        # The tile comes last: its bytes would queue before the records, whose arithmetic is to hide behind them.
        p_tile = checkpoint + i_s * slot_checkpoint + (i_hv * V + i_v) * K
        request_tile(desc, p_tile, tiles, ready, slot, i_hv * V + i_v, BV, K)

        xx, xk = gram(x, keys, MMA)
        gate_r, gate_c = window_gates(a_r, a_c, gate_scale, gate_bias, o_r, o_c, T)
        b_f, norm_r, scale_r, scale_c = window_factors(xx, b_r, b_c, gate_r, gate_c, o_r, o_c, scale, T)
        factors.store(b_f.reshape([N * N]))

        gate_sum = gl.where(valid > 0, gate_sum, 0.0)
        decay_j = gl.where(o_j < valid, gl.exp(gate_sum - gate_j) * norm_j, 0.0)
        b_w = gl.where((o_j < valid)[None, :], xk, 0.0) * decay_j[None, :]
        b_w *= gl.convert_layout(gl.exp(gate_r) * scale_r, gl.SliceLayout(1, RING))[:, None]
        carry = gl.convert_layout(gl.exp(gate_sum + gate_c) * scale_c, gl.SliceLayout(0, MMA))
        if i_v == 0:
            o_w = wrap(write_row + token_of(o_r, T), R)
            gl.store(p_gate + o_w, gl.where(flush > 0, 0.0, gate_sum) + gate_r, mask=o_r < length)
            if i_hv % (HV // H) == 0:
                gl.store(p_key_norm + o_w, norm_r, mask=o_r < length)
                store_keys(p_key, x, write_row, length, T, R, X)

        if b_d.dtype == gl.bfloat16:
            b_d = gl.convert_layout(gl.permute(b_d, [1, 0]), A)
        # the rows that the fold will need fly with the tile; masked off, they cost nothing
        rows = load_key_rows(p_key, read_row, last, flush > 0, K, R, J)
        mask = tf32_mask(length)
        y = project_records(b_d, b_w, valid, mask, MMA)
        y += project_checkpoint(tiles, ready, x, mask, BV, MMA) * carry[None, :]
        if flush > 0:
            fold(tiles, p_tile, rows, b_d, decay_j, gate_sum, MMA)
        solve_window(gl.convert_layout(y, ROWS), b_v, factors, p_out, p_delta, write_row, length, HV * V, T, R, V, ROWS)
        invalidate(ready, NC)
    else:
        o_v = gl.arange(0, BV, ROW)
        for i in gl.static_range(T):
            gl.store(p_out + i * (HV * V) + o_v, gl.zeros([BV], out.dtype.element_ty, ROW))


def select_tiling(dims: Dims, state_bytes: int, gpu: Gpu) -> Tiling:
    """Hand-tuned on one H200 (H = 16, HV = 32, K = V = 128, L = 16); microseconds of a launch, fp32 records.

    64 rows on 2 warps leave 6 programs an SM 34 KiB of shared memory each and 168 registers a thread. The kernel waits
    for memory, so nothing is gained by more rows (128 on 4 warps: 151.7 against 151.4 at T = 1, B = 256) or by fewer
    (32 on 1 warp: 151.5, and 87.3 against 81.4 with a bf16 checkpoint). Windows past 4 tokens do enough arithmetic for
    wider programs to pay, once the batch fills the card: 54.4 against 56.7 at T = 8, B = 64, but 14.5 against 12.9 at
    B = 8.

    Args:
        state_bytes: of a number of the checkpoint.
    """
    fills_card = dims.V % 128 == 0 and dims.B * dims.HV >= 1024
    is_wide = dims.T > 4 and fills_card and gpu.holds_two(128 * dims.K * state_bytes)
    return Tiling(128, 4) if is_wide else Tiling(64, 2)


def launch(
    arguments: tuple[Any, ...], dims: Dims, state: LayerState, gpu: Gpu | None = None, tiling: Tiling | None = None
) -> None:
    """Run the kernel on validated `operands.kernel_arguments`."""
    gpu = gpu or gpu_of(state.checkpoint.device)
    tiling = tiling or select_tiling(dims, state.checkpoint.itemsize, gpu)
    _replay_kernel[(dims.V // tiling.rows, dims.HV, dims.B)](
        tile_descriptor(state.checkpoint, tiling.rows) if gpu.tma else None,
        *arguments,
        **constants(dims, state.checkpoint.dtype, tiling),
    )
