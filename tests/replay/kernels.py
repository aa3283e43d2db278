"""One kernel of a layer, whatever the selection would be."""

from __future__ import annotations

from typing import Any, Literal

import torch

from replayssm.gdn import sm90_decode as gdn_hopper
from replayssm.gdn import triton_decode as gdn_portable
from replayssm.gdn.operands import kernel_arguments, validate
from replayssm.kda import sm90_decode as kda_hopper
from replayssm.kda import triton_decode as kda_portable

from .trial import Decode, Shape

KERNELS = {
    ('gdn', 'hopper'): gdn_hopper,
    ('gdn', 'portable'): gdn_portable,
    ('kda', 'hopper'): kda_hopper,
    ('kda', 'portable'): kda_portable,
}


def forced(kernel: Literal['hopper', 'portable'], shape: Shape) -> Decode:
    """`replay_decode` of one kernel of the shape's layer."""

    def decode(*operands: Any) -> torch.Tensor:
        tensors, scale, bound = operands[:9], operands[9], operands[10:]
        v, state = tensors[2], tensors[7]
        dims = validate(*tensors, gate=shape.gate)
        out = torch.full(v.shape, float('nan'), dtype=v.dtype, device=v.device)
        rest = (state, *bound) if kernel == 'hopper' else bound
        KERNELS[shape.layer, kernel].launch(kernel_arguments(*tensors, scale, out), dims, *rest)
        return out

    return decode


def to_float32(decode: Decode) -> Decode:
    """The same with float32 outputs, which show errors below the activations' rounding."""
    return lambda q, k, v, *rest: decode(q, k, v.float(), *rest)
