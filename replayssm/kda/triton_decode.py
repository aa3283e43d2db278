"""Decoding by replay in plain Triton: any GPU Triton supports, any head dimensions, fp32 arithmetic throughout.

One program per tile of BV state rows, value head and sequence. The committed records are one block of J rows, whose
keys are folded to the window's start once; the window's keys are another block of W rows, folded on from token to
token. A token sees the checkpoint, the records and the tokens before it. There is no matrix product, so nothing depends
on tensor cores. Nothing is autotuned: the kernel updates its operands in place, and a tuner would replay the update.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from replayssm import cursor
from replayssm.gdn import reference
from replayssm.gdn.operands import Dims
from replayssm.gdn.triton_decode import load
from replayssm.kda.triton_gate import log_gate

NORM_EPS = tl.constexpr(reference.NORM_EPS)
CURSOR_COLUMNS = tl.constexpr(cursor.CURSOR_COLUMNS)
SLOT, VALID, READ_ROW = tl.constexpr(cursor.SLOT), tl.constexpr(cursor.VALID), tl.constexpr(cursor.READ_ROW)
WRITE_ROW, LENGTH, FLUSH = tl.constexpr(cursor.WRITE_ROW), tl.constexpr(cursor.LENGTH), tl.constexpr(cursor.FLUSH)

BLOCK_ROWS = 16
"""State rows of a program, as for GDN: whole blocks stay in the registers of a few warps."""


def num_warps(head_k_dim: int) -> int:
    """Chosen by registers, not by time: `tests/replay/test_kernels_compile.py` holds sm_90 to no spills."""
    return 4 if head_k_dim <= 128 else 8


@triton.jit
def _replay(b_k, b_d, b_x):
    """sum_j (k_j . x) d_j: what the rows of a block, keys folded, add to the state's product with x."""
    return tl.sum(b_d * tl.sum(b_k * b_x[None, :], 1)[:, None], 0)


@triton.jit
def _replay_kernel(
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
    BOUNDED: tl.constexpr,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    J: tl.constexpr,
    W: tl.constexpr,
):
    i_v = tl.program_id(0)
    i_hv = tl.program_id(1)
    i_h = i_hv // (HV // H)
    i_b = tl.program_id(2).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    mask_k = o_k < K
    mask_v = o_v < V
    p_out = out + (i_b * T * HV + i_hv) * V + o_v
    p_cursor = cursors + i_b * CURSOR_COLUMNS
    slot = tl.load(p_cursor + SLOT).to(tl.int64)
    if slot < 0:
        for i in range(T):
            tl.store(p_out + i * (HV * V), tl.zeros([BV], out.dtype.element_ty), mask=mask_v)
        return
    valid = tl.load(p_cursor + VALID)
    read_row = tl.load(p_cursor + READ_ROW)
    write_row = tl.load(p_cursor + WRITE_ROW)
    length = tl.load(p_cursor + LENGTH)
    flush = tl.load(p_cursor + FLUSH)

    p_q = q + i_b * stride_qb + i_h * K + o_k
    p_k = k + i_b * stride_kb + i_h * K + o_k
    p_v = v + i_b * stride_vb + i_hv * V + o_v
    p_a = a + i_b * stride_ab + i_hv * K + o_k
    p_b = b + i_b * stride_bb + i_hv
    p_s = checkpoint + slot * slot_checkpoint + (i_hv * V + o_v[:, None]) * K + o_k[None, :]
    p_key = key + slot * slot_key + i_h * (R * K) + o_k
    p_key_norm = key_norm + slot * slot_key_norm + i_h * R
    p_delta = delta + slot * slot_delta + i_hv * (R * V) + o_v
    p_gate = gate + slot * slot_gate + i_hv * (R * K) + o_k
    rate = tl.load(neg_exp_a + i_hv)
    b_bias = load(dt_bias + i_hv * K + o_k, mask_k)
    b_s = load(p_s, mask_v[:, None] & mask_k[None, :])

    # Committed records. Behind a record act the gates of the rows after it, so gates are read one row further on and
    # summed from the newest.
    o_j = tl.arange(0, J)
    mask_j = o_j < valid
    o_r = (read_row + o_j) % R
    b_kr = load(p_key[None, :] + o_r[:, None] * K, mask_j[:, None] & mask_k[None, :])
    b_dr = load(p_delta[None, :] + o_r[:, None] * V, mask_j[:, None] & mask_v[None, :])
    mask_after = (o_j + 1 < valid)[:, None] & mask_k[None, :]
    b_ar = load(p_gate[None, :] + ((read_row + o_j + 1) % R)[:, None] * K, mask_after)
    b_gr = tl.where(mask_after, log_gate(b_ar, b_bias[None, :], rate, lower_bound, BOUNDED), 0.0)
    b_kr *= tl.exp(tl.cumsum(b_gr, 0, reverse=True)) * load(p_key_norm + o_r, mask_j)[:, None]
    mask_first = mask_k & (valid > 0)
    b_first = log_gate(load(p_gate + read_row * K, mask_first), b_bias, rate, lower_bound, BOUNDED)
    b_sum = tl.where(mask_first, b_first, 0.0) + tl.sum(b_gr, 0)

    # the window: b_now is the sum of its gates up to the current token, b_kw its keys folded up to there
    o_w = tl.arange(0, W)
    b_now = tl.zeros([BK], tl.float32)
    b_kw = tl.zeros([W, BK], tl.float32)
    b_dw = tl.zeros([W, BV], tl.float32)
    for i in range(T):
        inside = i < length
        is_token = (o_w == i)[:, None]
        i_r = (write_row + i) % R
        b_a = tl.load(p_a + i * stride_at, mask=mask_k & inside, other=0.0)
        b_ki = tl.load(p_k + i * stride_kt, mask=mask_k & inside, other=0.0)
        norm = tl.rsqrt(tl.sum(b_ki.to(tl.float32) * b_ki.to(tl.float32), 0) + NORM_EPS)
        if i_v == 0:
            tl.store(p_gate + i_r * K, b_a, mask=mask_k & inside)
            if i_hv % (HV // H) == 0:
                tl.store(p_key + i_r * K, b_ki, mask=mask_k & inside)
                tl.store(p_key_norm + i_r, norm, mask=inside)
        b_g = tl.where(mask_k & inside, log_gate(b_a, b_bias, rate, lower_bound, BOUNDED), 0.0)
        b_now += b_g
        b_x = b_ki.to(tl.float32) * norm
        b_kw = tl.where(is_token, b_x[None, :], b_kw * tl.exp(b_g)[None, :])
        b_qi = load(p_q + i * stride_qt, mask_k & inside)
        b_qi *= tl.rsqrt(tl.sum(b_qi * b_qi, 0) + NORM_EPS) * scale
        b_fold = tl.exp(b_now)
        b_whole = tl.exp(b_sum + b_now)
        # the token's own row of b_dw is still zero
        b_y = tl.sum(b_s * (b_x * b_whole)[None, :], 1) + _replay(b_kr, b_dr, b_x * b_fold) + _replay(b_kw, b_dw, b_x)
        beta = tl.sigmoid(load(p_b + i * stride_bt, inside))
        b_d = beta * (load(p_v + i * stride_vt, mask_v & inside) - b_y)
        b_dw = tl.where(is_token, b_d[None, :], b_dw)
        b_o = tl.sum(b_s * (b_qi * b_whole)[None, :], 1)
        b_o += _replay(b_kr, b_dr, b_qi * b_fold) + _replay(b_kw, b_dw, b_qi)
        tl.store(p_out + i * (HV * V), tl.where(inside, b_o, 0.0).to(out.dtype.element_ty), mask=mask_v)
        tl.store(p_delta + i_r * V, b_d.to(delta.dtype.element_ty), mask=mask_v & inside)

    if flush > 0:
        b_s *= tl.exp(b_sum)[None, :]
        b_after = tl.zeros([BK], tl.float32)
        for j in range(valid):
            i_r = (read_row + valid - 1 - j) % R
            b_ki = load(p_key + i_r * K, mask_k) * tl.exp(b_after) * tl.load(p_key_norm + i_r)
            b_s += load(p_delta + i_r * V, mask_v)[:, None] * b_ki[None, :]
            b_after += log_gate(load(p_gate + i_r * K, mask_k), b_bias, rate, lower_bound, BOUNDED)
        tl.store(p_s, b_s.to(checkpoint.dtype.element_ty), mask=mask_v[:, None] & mask_k[None, :])


def launch(arguments: tuple[Any, ...], dims: Dims, lower_bound: float | None) -> None:
    """Run the kernel on validated `operands.kernel_arguments`."""
    grid = (triton.cdiv(dims.V, BLOCK_ROWS), dims.HV, dims.B)
    _replay_kernel[grid](
        *arguments,
        0.0 if lower_bound is None else lower_bound,
        BOUNDED=lower_bound is not None,
        T=dims.T,
        H=dims.H,
        HV=dims.HV,
        K=dims.K,
        V=dims.V,
        R=dims.R,
        BK=triton.next_power_of_2(dims.K),
        BV=BLOCK_ROWS,
        J=triton.next_power_of_2(dims.R - dims.T),
        W=triton.next_power_of_2(dims.T),
        num_warps=num_warps(dims.K),
    )
