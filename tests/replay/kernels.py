"""One kernel of a layer, whatever the selection would be."""

from __future__ import annotations

from typing import Any, Literal

import torch

from replayssm.gdn import fused_decode as gdn_fused
from replayssm.gdn import triton_decode as gdn_portable
from replayssm.gdn.fused_launch import Gpu
from replayssm.gdn.operands import kernel_arguments, validate
from replayssm.kda import fused_decode as kda_fused
from replayssm.kda import triton_decode as kda_portable

from .trial import Decode, Shape

KERNELS = {
    ('gdn', 'fused'): gdn_fused,
    ('gdn', 'portable'): gdn_portable,
    ('kda', 'fused'): kda_fused,
    ('kda', 'portable'): kda_portable,
}
HOPPER, AMPERE, ADA = Gpu(True, 228 * 1024), Gpu(False, 164 * 1024), Gpu(False, 100 * 1024)
GPUS = {'tma': HOPPER, 'cp.async': AMPERE}
Kernel = Literal['tma', 'cp.async', 'portable']
"""The fused kernel by how it copies its tiles, or the portable one."""


def forced(kernel: Kernel, shape: Shape) -> Decode:
    """`replay_decode` of one kernel of the shape's layer."""

    def decode(*operands: Any) -> torch.Tensor:
        tensors, scale, bound = operands[:9], operands[9], operands[10:]
        v, state = tensors[2], tensors[7]
        dims = validate(*tensors, gate=shape.gate)
        out = torch.full(v.shape, float('nan'), dtype=v.dtype, device=v.device)
        arguments = kernel_arguments(*tensors, scale, out), dims
        if kernel == 'portable':
            KERNELS[shape.layer, 'portable'].launch(*arguments, *bound)
        else:
            KERNELS[shape.layer, 'fused'].launch(*arguments, state, *bound, gpu=GPUS[kernel])
        return out

    return decode


def to_float32(decode: Decode) -> Decode:
    """The same with float32 outputs, which show errors below the activations' rounding."""
    return lambda q, k, v, *rest: decode(q, k, v.float(), *rest)
