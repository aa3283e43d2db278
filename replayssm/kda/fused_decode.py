"""Decoding by replay on NVIDIA GPUs: one fused Gluon launch per layer. README.md has the equations.

A program takes BV state rows of one value head of one sequence. It asks for the records, and then for its checkpoint
tile. While that flies, the committed records' gates are evaluated and their keys folded to the window's start, and the
window's own products are formed. Then the tile is projected on all tokens of the window at once, and a forward
substitution gives d and the outputs. A flushing row rewrites its tile in place.
"""

from __future__ import annotations

import math
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.gdn.fused_launch import Gpu, Tiling, constants, gpu_of, record_rows, tile_descriptor
from replayssm.gdn.fused_ring import invalidate, load_cursor, make_ready, project_records, request_tile
from replayssm.gdn.fused_tiles import sigmoid, tf32_mask
from replayssm.gdn.fused_window import BK, load_values, solve_window
from replayssm.gdn.operands import Dims
from replayssm.kda.fused_ring import (
    fold,
    fold_keys,
    load_deltas,
    load_record_rows,
    newest_first,
    project_checkpoint,
    token_weights,
    window_weights,
)
from replayssm.kda.fused_window import (
    exp2,
    inverse_norms,
    load_rows,
    load_vectors,
    log2_gate,
    store_factors,
    store_logits,
    store_window,
    window_gates,
    window_products,
)
from replayssm.layout import LayerState

LOG2E = gl.constexpr(math.log2(math.e))


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
    lower_bound,
    BOUNDED: gl.constexpr,
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
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WIN: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    SEQ: gl.constexpr = gl.BlockedLayout([J // 4, 4], [4, 8], [1, gl.num_warps()], [1, 0])
    KEYS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    i_v = gl.program_id(0) * BV
    i_hv = gl.program_id(1)
    i_h = i_hv // (HV // H)
    i_b = gl.program_id(2).to(gl.int64)
    slot, valid, read_row, write_row, length, flush = load_cursor(cursors, i_b)

    tiles = gl.allocate_shared_memory(checkpoint.dtype.element_ty, [NC, 1, BV, BK], TILE)
    ready = make_ready(desc, NC)
    factors = gl.allocate_shared_memory(gl.float32, [N * N], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [K], VECTOR)

    # loads that need no slot go before the branch, to fly together with the cursors
    p_k = k + i_b * stride_kb + i_h * K
    x = load_rows(q + i_b * stride_qb + i_h * K, p_k, stride_qt, stride_kt, T, N, NC, WIN)
    tokens = load_vectors(p_k, stride_kt, T, NC, WIN)
    logits = load_vectors(a + i_b * stride_ab + i_hv * K, stride_at, T, NC, WIN)
    betas = ()
    for i in gl.static_range(T):
        betas = betas + (sigmoid(gl.load(b + i_b * stride_bb + i_hv + i * stride_bt).to(gl.float32)),)
    rate = gl.load(neg_exp_a + i_hv) * LOG2E
    lower_bound = lower_bound * LOG2E
    o_n = gl.arange(0, N, gl.SliceLayout(1, WIN))
    o_c = gl.arange(0, BK, gl.SliceLayout(0, WIN))
    o_k = gl.arange(0, K, gl.SliceLayout(0, SEQ))
    p_bias = dt_bias + i_hv * K
    bias = gl.load(p_bias + o_k).to(gl.float32)
    if T == 1:
        own_key, own_query = gl.load(p_k + o_k), gl.load(q + i_b * stride_qb + i_h * K + o_k)
        own_logits = gl.load(a + i_b * stride_ab + i_hv * K + o_k)
    ROW: gl.constexpr = gl.SliceLayout(1, ROWS)
    b_v = load_values(v + i_b * stride_vb + i_hv * V + i_v, stride_vt, BV, T, ROW)
    p_out = out + (i_b * T * HV + i_hv) * V + i_v

    if slot >= 0:
        i_s = slot.to(gl.int64)
        p_key = key + i_s * slot_key + i_h * (R * K)
        p_key_norm = key_norm + i_s * slot_key_norm + i_h * R
        p_gate = gate + i_s * slot_gate + i_hv * (R * K)
        p_delta = delta + i_s * slot_delta + i_hv * (R * V) + i_v
        # a dead row repeats the oldest live row's address under weight zero: no mask, no traffic, no NaN
        last = gl.maximum(valid, 1) - 1
        o_j = gl.arange(0, J, gl.SliceLayout(1, SEQ))
        row_j = newest_first(o_j, read_row, last, R)
        keys = load_record_rows(p_key, row_j, K, SEQ)
        norm_j = gl.load(p_key_norm + row_j)
        newer = load_record_rows(p_gate, newest_first(gl.maximum(o_j - 1, 0), read_row, last, R), K, SEQ)
        first = gl.load(p_gate + read_row * K + o_k)
        b_d = load_deltas(p_delta, read_row, last, R, V, BV, J, A)
        # The tile comes last: its bytes would queue before the records, whose arithmetic is to hide behind them.
        p_tile = checkpoint + i_s * slot_checkpoint + (i_hv * V + i_v) * K
        request_tile(desc, p_tile, tiles, ready, slot, i_hv * V + i_v, BV, K)

        rows, whole = fold_keys(keys, norm_j, newer, first, bias, rate, lower_bound, valid, BOUNDED)
        sums.store(whole)
        norm_n = inverse_norms(x, WIN)
        scale_n = norm_n * scale
        for i in gl.static_range(T):
            scale_n = gl.where(o_n == i, norm_n * betas[i], scale_n)
        products = ()
        for _ in gl.static_range(T):
            products = products + (gl.zeros([N, BK], gl.float32, WIN),)
        x_window, x_checkpoint = (), ()
        for c in gl.static_range(NC):
            b_bias = gl.load(p_bias + c * BK + o_c).to(gl.float32)
            gate_t, gate_n = window_gates(logits, c, b_bias, rate, lower_bound, o_n, T, BOUNDED)
            raw = x[c].to(gl.float32)
            added = ()
            for i in gl.static_range(T):
                added = added + (products[i] + window_products(raw, tokens[i][c], gate_n, gate_t[i], T),)
            products = added
            decayed = raw * exp2(gate_n) * scale_n[:, None]
            whole = exp2(sums.slice(c * BK, BK).load(gl.SliceLayout(0, WIN)))
            x_window = x_window + (decayed,)
            x_checkpoint = x_checkpoint + (decayed * whole[None, :],)
        store_factors(factors, products, norm_n, scale_n, betas, o_n, T)
        if i_v == 0:
            store_logits(p_gate, logits, write_row, length, T, R, WIN)
            if i_hv % (HV // H) == 0:
                store_window(p_key, p_key_norm, x, norm_n, write_row, length, T, R, WIN)

        if b_d.dtype == gl.bfloat16:
            b_d = gl.convert_layout(gl.permute(b_d, [1, 0]), A)
        mask = tf32_mask(length)
        if T == 1:
            own = exp2(log2_gate(own_logits, bias, rate, lower_bound, BOUNDED))
            columns = (own_key.to(gl.float32) * own, own_query.to(gl.float32) * own)
            c_j = token_weights(rows, columns, scale_n, MMA)
        else:
            folded = gl.allocate_shared_memory(gl.float32, [J, K], KEYS, rows)
            c_j = window_weights(folded, x_window, mask, MMA)
        y = project_records(b_d, gl.permute(c_j, [1, 0]), valid, mask, MMA)
        y += project_checkpoint(tiles, ready, x_checkpoint, mask, BV, MMA)
        if flush > 0:
            if T == 1:
                # allocated where it is needed, so that three programs fit an SM
                folded = gl.allocate_shared_memory(gl.float32, [J, K], KEYS, rows)
            fold(tiles, p_tile, folded, sums, b_d, MMA)
        solve_window(gl.convert_layout(y, ROWS), b_v, factors, p_out, p_delta, write_row, length, HV * V, T, R, V, ROWS)
        invalidate(ready, NC)
    else:
        o_v = gl.arange(0, BV, ROW)
        for i in gl.static_range(T):
            gl.store(p_out + i * (HV * V) + o_v, gl.zeros([BV], out.dtype.element_ty, ROW))


def select_tiling(dims: Dims, state_bytes: int, gpu: Gpu) -> Tiling:
    """A whole head on 4 warps: the gates of the records are evaluated once, 3 programs an SM with 64 KiB of state each.

    Swept on one H200 with H = HV = 16, K = V = 128, L = 16, before the gates became cheaper: half the rows took 7 to
    51 % longer, 8 warps 24 to 112 %. Half the rows are for GPUs on which two whole heads would not fit an SM.

    Args:
        state_bytes: of a number of the checkpoint.
    """
    keys = record_rows(dims) * dims.K * 4
    is_whole = dims.V % 128 == 0 and gpu.holds_two(128 * dims.K * state_bytes + keys)
    return Tiling(128 if is_whole else 64, 4)


def launch(
    arguments: tuple[Any, ...],
    dims: Dims,
    state: LayerState,
    lower_bound: float | None,
    gpu: Gpu | None = None,
    tiling: Tiling | None = None,
) -> None:
    """Run the kernel on validated `operands.kernel_arguments`."""
    gpu = gpu or gpu_of(state.checkpoint.device)
    tiling = tiling or select_tiling(dims, state.checkpoint.itemsize, gpu)
    _replay_kernel[(dims.V // tiling.rows, dims.HV, dims.B)](
        tile_descriptor(state.checkpoint, tiling.rows) if gpu.tma else None,
        *arguments,
        0.0 if lower_bound is None else lower_bound,
        BOUNDED=lower_bound is not None,
        **constants(dims, state.checkpoint.dtype, tiling),
        # without TMA a window takes a few registers more than three programs an SM leave it
        maxnreg=168 if not gpu.tma and tiling.rows == 128 and 1 < dims.T <= 4 else None,
    )
