"""`reference.materialise` as one Triton kernel: a state is read once and written once, with its records folded in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replayssm import cursor
from replayssm.gdn.triton_decode import load
from replayssm.kda.triton_gate import log_gate
from replayssm.layout import LayerState

CURSOR_COLUMNS = tl.constexpr(cursor.CURSOR_COLUMNS)
SLOT, VALID, READ_ROW = tl.constexpr(cursor.SLOT), tl.constexpr(cursor.VALID), tl.constexpr(cursor.READ_ROW)

BLOCK_ROWS = 32
"""State rows of a program: 32 rows of 128 fp32 on 4 warps are 32 registers a thread."""


@triton.jit
def _materialise_kernel(
    checkpoint,
    key,
    key_norm,
    delta,
    gate,
    cursors,
    neg_exp_a,
    dt_bias,
    out,
    slot_checkpoint,
    slot_key,
    slot_key_norm,
    slot_delta,
    slot_gate,
    lower_bound,
    BOUNDED: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    i_v = tl.program_id(0)
    i_hv = tl.program_id(1)
    i_h = i_hv // (HV // H)
    i_b = tl.program_id(2).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    mask_k = o_k < K
    mask_v = o_v < V
    mask_s = mask_v[:, None] & mask_k[None, :]
    o_s = (i_hv * V + o_v[:, None]) * K + o_k[None, :]
    p_cursor = cursors + i_b * CURSOR_COLUMNS
    slot = tl.load(p_cursor + SLOT).to(tl.int64)
    b_s = tl.zeros([BV, BK], tl.float32)
    if slot >= 0:
        valid = tl.load(p_cursor + VALID)
        read_row = tl.load(p_cursor + READ_ROW)
        rate = tl.load(neg_exp_a + i_hv)
        b_bias = load(dt_bias + i_hv * K + o_k, mask_k)
        p_key = key + slot * slot_key + i_h * (R * K) + o_k
        p_delta = delta + slot * slot_delta + i_hv * (R * V) + o_v
        p_gate = gate + slot * slot_gate + i_hv * (R * K) + o_k
        # from the newest record back: b_after is the sum of the gates behind the row
        b_after = tl.zeros([BK], tl.float32)
        for j in range(valid):
            row = (read_row + valid - 1 - j) % R
            norm = tl.load(key_norm + slot * slot_key_norm + i_h * R + row)
            b_k = load(p_key + row * K, mask_k) * tl.exp(b_after) * norm
            b_s += load(p_delta + row * V, mask_v)[:, None] * b_k[None, :]
            b_after += log_gate(load(p_gate + row * K, mask_k), b_bias, rate, lower_bound, BOUNDED)
        b_s += load(checkpoint + slot * slot_checkpoint + o_s, mask_s) * tl.exp(b_after)[None, :]
    tl.store(out + i_b * (HV * V * K) + o_s, b_s, mask=mask_s)


def materialise(
    state: LayerState,
    cursors: torch.Tensor,
    neg_exp_a: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """See `reference.materialise`; dimensions of `state` behind the slot are contiguous.

    Raises:
        ValueError: `neg_exp_a` is not float32.
    """
    if neg_exp_a.dtype != torch.float32:
        raise ValueError(f'neg_exp_a.dtype: expected torch.float32, got {neg_exp_a.dtype}')
    batch, (_, value_heads, head_v_dim, head_k_dim) = cursors.size(0), state.checkpoint.shape
    out = torch.empty(batch, *state.checkpoint.shape[1:], dtype=torch.float32, device=cursors.device)
    if batch == 0:
        return out
    _materialise_kernel[(triton.cdiv(head_v_dim, BLOCK_ROWS), value_heads, batch)](
        *state,
        cursors,
        neg_exp_a,
        dt_bias,
        out,
        *(tensor.stride(0) for tensor in state),
        0.0 if lower_bound is None else lower_bound,
        BOUNDED=lower_bound is not None,
        H=state.key.size(1),
        HV=value_heads,
        K=head_k_dim,
        V=head_v_dim,
        R=state.key_norm.size(-1),
        BK=triton.next_power_of_2(head_k_dim),
        BV=BLOCK_ROWS,
        num_warps=4,
    )
    return out
