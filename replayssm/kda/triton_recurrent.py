"""`reference.recurrent_decode` as one Triton kernel: a state is read once and written once a token.

This is what ReplaySSM spares: it is here so that a model is decoded without ReplaySSM as fast as states allow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replayssm.gdn import reference
from replayssm.gdn.triton_decode import load
from replayssm.kda.triton_gate import log_gate

NORM_EPS = tl.constexpr(reference.NORM_EPS)
BLOCK_ROWS = 32
"""State rows of a program: 32 rows of 128 fp32 on 4 warps are 32 registers a thread."""


@triton.jit
def _recurrent_kernel(
    q,
    k,
    v,
    a,
    b,
    neg_exp_a,
    dt_bias,
    out,
    states,
    slots,
    history,
    scale,
    lower_bound,
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
    stride_slot,
    stride_snapshot,
    SNAPSHOTS: tl.constexpr,
    BOUNDED: tl.constexpr,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    i_hv = tl.program_id(1)
    i_h = i_hv // (HV // H)
    i_b = tl.program_id(2).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    mask_k, mask_v = o_k < K, o_v < V
    mask_s = mask_v[:, None] & mask_k[None, :]
    p_out = out + (i_b * T * HV + i_hv) * V + o_v
    slot = tl.load(slots + i_b).to(tl.int64)
    if slot < 0:
        for i in range(T):
            tl.store(p_out + i * (HV * V), tl.zeros([BV], out.dtype.element_ty), mask=mask_v)
        return
    before = 0
    if SNAPSHOTS > 1:
        before = tl.load(history + i_b).to(tl.int32)
    p_s = states + slot * stride_slot + (i_hv * V + o_v[:, None]) * K + o_k[None, :]
    b_s = load(p_s + before % SNAPSHOTS * stride_snapshot, mask_s)
    rate = tl.load(neg_exp_a + i_hv)
    b_bias = load(dt_bias + i_hv * K + o_k, mask_k)
    for i in range(T):
        b_q = load(q + i_b * stride_qb + i * stride_qt + i_h * K + o_k, mask_k)
        b_k = load(k + i_b * stride_kb + i * stride_kt + i_h * K + o_k, mask_k)
        b_v = load(v + i_b * stride_vb + i * stride_vt + i_hv * V + o_v, mask_v)
        b_a = load(a + i_b * stride_ab + i * stride_at + i_hv * K + o_k, mask_k)
        beta = tl.sigmoid(tl.load(b + i_b * stride_bb + i * stride_bt + i_hv).to(tl.float32))
        b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + NORM_EPS) * scale
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + NORM_EPS)
        b_s *= tl.exp(log_gate(b_a, b_bias, rate, lower_bound, BOUNDED))[None, :]
        b_d = beta * (b_v - tl.sum(b_s * b_k[None, :], 1))
        b_s += b_d[:, None] * b_k[None, :]
        tl.store(p_out + i * (HV * V), tl.sum(b_s * b_q[None, :], 1).to(out.dtype.element_ty), mask=mask_v)
        p_after = p_s + (before + i + 1) % SNAPSHOTS * stride_snapshot
        tl.store(p_after, b_s.to(states.dtype.element_ty), mask=mask_s)


def recurrent_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    neg_exp_a: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """See `reference.recurrent_decode`; dimensions behind the token and behind the slot or snapshot are contiguous."""
    batch, tokens, key_heads, head_k_dim = q.shape
    value_heads, head_v_dim = v.shape[2:]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    _recurrent_kernel[(triton.cdiv(head_v_dim, BLOCK_ROWS), value_heads, batch)](
        q,
        k,
        v,
        a,
        b,
        neg_exp_a,
        dt_bias,
        out,
        states,
        slots,
        history,
        head_k_dim**-0.5 if scale is None else scale,
        0.0 if lower_bound is None else lower_bound,
        *(stride for x in (q, k, v, a, b) for stride in x.stride()[:2]),
        states.stride(0),
        0 if history is None else states.stride(1),
        SNAPSHOTS=1 if history is None else states.size(1),
        BOUNDED=lower_bound is not None,
        T=tokens,
        H=key_heads,
        HV=value_heads,
        K=head_k_dim,
        V=head_v_dim,
        BK=triton.next_power_of_2(head_k_dim),
        BV=BLOCK_ROWS,
        num_warps=4 if head_k_dim <= 128 else 8,
    )
    return out
