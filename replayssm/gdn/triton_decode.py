"""Decoding by replay in plain Triton: any GPU Triton supports, any head dimensions, fp32 arithmetic throughout.

One program per tile of BV state rows, value head and sequence. The committed records are one block of J rows and the
window's tokens another of W, both in registers; a token sees the checkpoint, the records and the tokens before it.
There is no matrix product, so nothing depends on tensor cores. Nothing is autotuned: the kernel updates its operands in
place, and a tuner would replay the update.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from replayssm import cursor
from replayssm.gdn import reference
from replayssm.gdn.operands import Dims

NORM_EPS = tl.constexpr(reference.NORM_EPS)
CURSOR_COLUMNS = tl.constexpr(cursor.CURSOR_COLUMNS)
SLOT, VALID, READ_ROW = tl.constexpr(cursor.SLOT), tl.constexpr(cursor.VALID), tl.constexpr(cursor.READ_ROW)
WRITE_ROW, LENGTH, FLUSH = tl.constexpr(cursor.WRITE_ROW), tl.constexpr(cursor.LENGTH), tl.constexpr(cursor.FLUSH)

BLOCK_ROWS = 16
"""State rows of a program: few enough that whole blocks stay in the registers of one or two warps, which then reduce
with hardly any shared memory and share an SM with many others."""


def num_warps(head_k_dim: int) -> int:
    """Chosen by registers, not by time: 128 to 233 a thread without spilling for sm_90, L = 16, T = 1 to 8."""
    return 2 if head_k_dim <= 128 else 8


@triton.jit
def log1p(u):
    """For 0 <= u <= 1, as the series of 2 artanh(u / (2 + u)): libdevice's is out of the interpreter's reach."""
    s = u / (2.0 + u)
    s2 = s * s
    series = tl.full(u.shape, 1.0 / 15, tl.float32)
    for i in tl.static_range(7):
        series = series * s2 + 1.0 / (13 - 2 * i)
    return 2.0 * s * series


@triton.jit
def load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _replay(b_k, b_d, b_x, b_w):
    """sum_j w_j (k_j . x) d_j: what the rows of a block add to the state's product with x."""
    b_c = tl.sum(b_k.to(tl.float32) * b_x[None, :], 1) * b_w
    return tl.sum(b_d * b_c[:, None], 0)


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

    p_q = q + i_b * stride_qb + i_h * K
    p_k = k + i_b * stride_kb + i_h * K
    p_v = v + i_b * stride_vb + i_hv * V
    p_s = checkpoint + slot * slot_checkpoint + (i_hv * V + o_v[:, None]) * K + o_k[None, :]
    p_key = key + slot * slot_key + i_h * (R * K)
    p_key_norm = key_norm + slot * slot_key_norm + i_h * R
    p_delta = delta + slot * slot_delta + i_hv * (R * V)
    p_gate = gate + slot * slot_gate + i_hv * R
    b_s = load(p_s, mask_v[:, None] & mask_k[None, :])

    # committed records; gates are counted from the window's start, so no difference of large sums is formed later
    o_j = tl.arange(0, J)
    mask_j = o_j < valid
    o_r = (read_row + o_j) % R
    b_kr = tl.load(p_key + o_r[:, None] * K + o_k[None, :], mask=mask_j[:, None] & mask_k[None, :], other=0.0)
    b_dr = load(p_delta + o_r[:, None] * V + o_v[None, :], mask_j[:, None] & mask_v[None, :])
    b_gr = load(p_gate + o_r, mask_j)
    gate_sum = tl.sum(tl.where(o_j == valid - 1, b_gr, 0.0), 0)
    b_wr = tl.where(mask_j, tl.exp(gate_sum - b_gr) * load(p_key_norm + o_r, mask_j), 0.0)

    # the window's tokens
    o_i = tl.arange(0, W)
    mask_i = o_i < length
    b_kw = tl.load(p_k + o_i[:, None] * stride_kt + o_k[None, :], mask=mask_i[:, None] & mask_k[None, :], other=0.0)
    b_nw = tl.rsqrt(tl.sum(b_kw.to(tl.float32) * b_kw.to(tl.float32), 1) + NORM_EPS)
    b_a = load(a + i_b * stride_ab + i_hv + o_i * stride_at, mask_i) + tl.load(dt_bias + i_hv).to(tl.float32)
    softplus = tl.maximum(b_a, 0.0) + log1p(tl.exp(-tl.abs(b_a)))
    b_gw = tl.cumsum(tl.where(mask_i, tl.load(neg_exp_a + i_hv) * softplus, 0.0), 0)
    b_beta = tl.sigmoid(load(b + i_b * stride_bb + i_hv + o_i * stride_bt, mask_i))
    if i_v == 0:
        o_w = (write_row + o_i) % R
        tl.store(p_gate + o_w, b_gw + tl.where(flush > 0, 0.0, gate_sum), mask=mask_i)
        if i_hv % (HV // H) == 0:
            p_new = p_key + o_w[:, None] * K + o_k[None, :]
            tl.store(p_new, b_kw, mask=mask_i[:, None] & mask_k[None, :])
            tl.store(p_key_norm + o_w, b_nw, mask=mask_i)

    b_dw = tl.zeros([W, BV], tl.float32)
    for i in range(T):
        inside = i < length
        is_token = o_i == i
        g = tl.sum(tl.where(is_token, b_gw, 0.0), 0)
        b_ki = load(p_k + i * stride_kt + o_k, mask_k & inside)
        b_ki *= tl.rsqrt(tl.sum(b_ki * b_ki, 0) + NORM_EPS)
        b_qi = load(p_q + i * stride_qt + o_k, mask_k & inside)
        b_qi *= tl.rsqrt(tl.sum(b_qi * b_qi, 0) + NORM_EPS) * scale
        b_ww = tl.where(o_i <= i, tl.exp(tl.minimum(g - b_gw, 0.0)) * b_nw, 0.0)
        # the token's own row of b_dw is still zero
        b_y = tl.sum(b_s * b_ki[None, :], 1) * tl.exp(gate_sum + g)
        b_y += _replay(b_kr, b_dr, b_ki, b_wr * tl.exp(g)) + _replay(b_kw, b_dw, b_ki, b_ww)
        b_d = tl.sum(tl.where(is_token, b_beta, 0.0), 0) * (load(p_v + i * stride_vt + o_v, mask_v & inside) - b_y)
        b_dw = tl.where(is_token[:, None], b_d[None, :], b_dw)
        b_o = tl.sum(b_s * b_qi[None, :], 1) * tl.exp(gate_sum + g)
        b_o += _replay(b_kr, b_dr, b_qi, b_wr * tl.exp(g)) + _replay(b_kw, b_dw, b_qi, b_ww)
        tl.store(p_out + i * (HV * V), tl.where(inside, b_o, 0.0).to(out.dtype.element_ty), mask=mask_v)
        p_d = p_delta + ((write_row + i) % R) * V + o_v
        tl.store(p_d, b_d.to(delta.dtype.element_ty), mask=mask_v & inside)

    if flush > 0:
        b_s *= tl.exp(gate_sum)
        for j in range(valid):
            i_r = (read_row + j) % R
            weight = tl.exp(gate_sum - tl.load(p_gate + i_r)) * tl.load(p_key_norm + i_r)
            b_d = load(p_delta + i_r * V + o_v, mask_v) * weight
            b_s += b_d[:, None] * load(p_key + i_r * K + o_k, mask_k)[None, :]
        tl.store(p_s, b_s.to(checkpoint.dtype.element_ty), mask=mask_v[:, None] & mask_k[None, :])


def launch(arguments: tuple[Any, ...], dims: Dims) -> None:
    """Run the kernel on validated `operands.kernel_arguments`."""
    grid = (triton.cdiv(dims.V, BLOCK_ROWS), dims.HV, dims.B)
    _replay_kernel[grid](
        *arguments,
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
