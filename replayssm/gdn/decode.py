"""Decoding by replay on a GPU: the launcher of `reference.replay_decode`'s kernels and their selection."""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import torch
import triton

from replayssm.gdn import triton_decode
from replayssm.gdn.operands import Dims, check_cursors, debug_checks, kernel_arguments, validate
from replayssm.layout import LayerState

FUSED_HEAD_DIMS = (64, 128, 256)
ALIGNMENT = 64
"""Of slot strides, in bytes: of multiples of 16 numbers Triton knows that 16 bytes can be copied at a time."""


class Selection(NamedTuple):
    """The kernel that a shape runs on, and why."""

    kernel: str
    reason: str


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
) -> torch.Tensor:
    """One decode step (T = 1) or the verification of a window of drafts (T <= 8): `reference.replay_decode` on a GPU.

    `state` is mutated in place. Nothing synchronises with the host and the grid depends on shapes alone, so a call can
    be captured in a CUDA graph. Arguments and result are the reference's, with these bounds: dimensions behind the
    token of q, k, v, a, b and behind the slot of `state` are contiguous, and a ring holds at most 32 records.

    Raises:
        ValueError: see `operands.validate`; with REPLAYSSM_DEBUG=1 also `operands.check_cursors`.
    """
    dims = validate(q, k, v, a, b, neg_exp_a, dt_bias, state, cursors)
    selection = select_kernel(k.device, k.dtype, dims, *placement(state.checkpoint))
    if debug_checks():
        check_cursors(cursors, dims, state.checkpoint.size(0))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if dims.B == 0:
        return out
    scale = dims.K**-0.5 if scale is None else scale
    arguments = kernel_arguments(q, k, v, a, b, neg_exp_a, dt_bias, state, cursors, scale, out)
    if selection.kernel == 'fused':
        from replayssm.gdn import fused_decode

        fused_decode.launch(arguments, dims, state)
    else:
        triton_decode.launch(arguments, dims)
    return out


@functools.cache
def select_kernel(
    device: torch.device, activation_dtype: torch.dtype, dims: Dims, slot_stride_bytes: int, aligned: bool
) -> Selection:
    """Choose a kernel: 'fused' (Gluon, NVIDIA) or 'triton' (portable).

    Raises:
        ValueError: `device` is no GPU and Triton's interpreter is off.
    """
    if device.type != 'cuda':
        if not triton.knobs.runtime.interpret:
            raise ValueError(f"device: expected a GPU, or Triton's interpreter (TRITON_INTERPRET=1), got {device}")
        return Selection('triton', "Triton's interpreter")
    capability = torch.cuda.get_device_capability(device)
    for holds, reason in (
        (torch.version.hip is None and capability >= (8, 0), f'compute capability {capability} is below 8.0'),
        (importlib.util.find_spec('triton.experimental.gluon') is not None, f'Triton {triton.__version__} lacks Gluon'),
        (activation_dtype == torch.bfloat16, f'activations are {activation_dtype}, not torch.bfloat16'),
        (dims.K in FUSED_HEAD_DIMS and dims.V in FUSED_HEAD_DIMS, f'head dimensions {dims.K}, {dims.V}'),
        (aligned and slot_stride_bytes % ALIGNMENT == 0, f'checkpoints are not aligned to {ALIGNMENT} bytes'),
    ):
        if not holds:
            return Selection('triton', reason)
    return Selection('fused', f'compute capability {capability}, bfloat16 activations')


def placement(checkpoint: torch.Tensor) -> tuple[int, bool]:
    """Bytes from slot to slot, and whether the first slot is aligned."""
    return checkpoint.stride(0) * checkpoint.element_size(), checkpoint.data_ptr() % 16 == 0
