"""`reference.materialise` as one Triton kernel: a state is read once and written once, with its records folded in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replayssm import cursor
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
    out,
    slot_checkpoint,
    slot_key,
    slot_key_norm,
    slot_delta,
    slot_gate,
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
        b_s = tl.load(checkpoint + slot * slot_checkpoint + o_s, mask=mask_s, other=0.0).to(tl.float32)
        if valid > 0:
            p_gate = gate + slot * slot_gate + i_hv * R
            gate_sum = tl.load(p_gate + (read_row + valid - 1) % R)
            b_s *= tl.exp(gate_sum)
            for j in range(valid):
                row = (read_row + j) % R
                b_k = tl.load(key + slot * slot_key + (i_h * R + row) * K + o_k, mask=mask_k, other=0.0).to(tl.float32)
                b_d = tl.load(delta + slot * slot_delta + (i_hv * R + row) * V + o_v, mask=mask_v, other=0.0)
                norm = tl.load(key_norm + slot * slot_key_norm + i_h * R + row)
                weight = tl.exp(gate_sum - tl.load(p_gate + row)) * norm
                b_s += b_d.to(tl.float32)[:, None] * (b_k * weight)[None, :]
    tl.store(out + i_b * (HV * V * K) + o_s, b_s, mask=mask_s)


def materialise(state: LayerState, cursors: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """See `reference.materialise`; dimensions of `state` behind the slot are contiguous.

    Raises:
        ValueError: `dtype` is not float32.
    """
    if dtype != torch.float32:
        raise ValueError(f'dtype: expected torch.float32, got {dtype}')
    batch, (_, value_heads, head_v_dim, head_k_dim) = cursors.size(0), state.checkpoint.shape
    out = torch.empty(batch, *state.checkpoint.shape[1:], dtype=dtype, device=cursors.device)
    if batch == 0:
        return out
    _materialise_kernel[(triton.cdiv(head_v_dim, BLOCK_ROWS), value_heads, batch)](
        *state,
        cursors,
        out,
        *(tensor.stride(0) for tensor in state),
        H=state.key.size(1),
        HV=value_heads,
        K=head_k_dim,
        V=head_v_dim,
        R=state.gate.size(-1),
        BK=triton.next_power_of_2(head_k_dim),
        BV=BLOCK_ROWS,
        num_warps=4,
    )
    return out
