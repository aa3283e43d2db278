"""Decoding by replay on a GPU: the launcher of `reference.replay_decode`'s kernels and their selection."""

from __future__ import annotations

import torch

from replayssm.gdn.decode import Selection, placement
from replayssm.gdn.decode import select_kernel as select_gdn_kernel
from replayssm.gdn.operands import Dims, check_cursors, debug_checks, kernel_arguments, validate
from replayssm.kda import triton_decode
from replayssm.layout import LayerState

FUSED_HEAD_DIMS = (64, 128)


def replay_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    neg_exp_a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: LayerState,
    cursors: torch.Tensor,
    scale: float | None = None,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """One decode step (T = 1) or the verification of a window of drafts (T <= 8): `reference.replay_decode` on a GPU.

    `state` is mutated in place. Nothing synchronises with the host and the grid depends on shapes alone, so a call can
    be captured in a CUDA graph. Arguments and result are the reference's, with these bounds: dimensions behind the
    token of q, k, v, a, b and behind the slot of `state` are contiguous, and a ring holds at most 32 records.

    Raises:
        ValueError: see `operands.validate`; with REPLAYSSM_DEBUG=1 also `operands.check_cursors`.
    """
    dims = validate(q, k, v, a, b, neg_exp_a, dt_bias, state, cursors, gate='vector')
    selection = select_kernel(k.device, k.dtype, dims, *placement(state.checkpoint))
    if debug_checks():
        check_cursors(cursors, dims, state.checkpoint.size(0))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if dims.B == 0:
        return out
    scale = dims.K**-0.5 if scale is None else scale
    arguments = kernel_arguments(q, k, v, a, b, neg_exp_a, dt_bias, state, cursors, scale, out)
    if selection.kernel == 'fused':
        from replayssm.kda import fused_decode

        fused_decode.launch(arguments, dims, state, lower_bound)
    else:
        triton_decode.launch(arguments, dims, lower_bound)
    return out


def select_kernel(
    device: torch.device, activation_dtype: torch.dtype, dims: Dims, slot_stride_bytes: int, aligned: bool
) -> Selection:
    """Choose a kernel by the rules of `gdn.decode.select_kernel`, with bounds of this one's.

    Raises:
        ValueError: `device` is no GPU and Triton's interpreter is off.
    """
    selection = select_gdn_kernel(device, activation_dtype, dims, slot_stride_bytes, aligned)
    if selection.kernel == 'fused' and dims.K not in FUSED_HEAD_DIMS:
        return Selection('triton', f'key dimension {dims.K}')
    return selection
