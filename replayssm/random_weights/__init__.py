"""Random weights under a checkpoint's names, one whole tensor at a time: for benchmarks of models that are not there.

A tensor depends on its name, shape and kind of device only, so that every number of ranks cuts the same model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

FP8_BLOCK = 128
FP8_STD = 32.0
"""Of the numbers under a scale: far from the 448 that FP8 ends at, and from those that it holds with few bits."""
_GAIN = 1.25
"""Standard deviation of a layer's outputs over that of its inputs; with 4096 inputs weights are N(0, 0.02)."""
_OUTPUT_GAIN = 0.25
"""Of that, for what is added to the residual stream: many layers must not drown the token that they have read."""
_OUTPUTS = ('o_proj.weight', 'out_proj.weight', 'down_proj.weight', 'experts.down_proj')


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint.

    Attributes:
        is_draft: of the layer that proposes tokens.
        is_fp8: stored in blocks of 128 x 128 with a tensor of scales beside it.
        norm: for the weight of a norm, the number that leaves its input as it is.
    """

    name: str
    shape: tuple[int, ...]
    is_draft: bool = False
    is_fp8: bool = False
    norm: float | None = None


def weights_of(config: Any) -> Iterator[Weight]:
    """Yield every tensor that the checkpoint of a transformers `config` has.

    Raises:
        ValueError: names and shapes of this model or format are not known here.
    """
    if config.model_type == 'glm5_next':
        from replayssm.random_weights import glm5_next

        quantization = getattr(config, 'quantization_config', None) or {}
        return glm5_next.weights_of(config.text_config, quantization)
    if config.model_type in ('qwen3_5', 'qwen3_5_moe'):
        from replayssm.random_weights import qwen3_5

        if getattr(config, 'quantization_config', None):
            raise ValueError(f'random weights: expected {config.model_type} in BF16, got a quantization_config')
        return qwen3_5.weights_of(config)
    raise ValueError(f'random weights: expected a glm5_next, qwen3_5 or qwen3_5_moe, got {config.model_type!r}')


def draw(weight: Weight, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a weight and, in FP8, its scales, under their names, on the generator's device.

    Args:
        dtype: of what is not in FP8.
        generator: seeded anew; mutated in place.
    """
    digest = hashlib.sha256(weight.name.encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], 'little') >> 1)
    std, mean = _distribution(weight)
    numbers = torch.empty(weight.shape, dtype=torch.bfloat16 if weight.is_fp8 else dtype, device=generator.device)
    if not weight.is_fp8:
        yield weight.name, numbers.normal_(mean, std, generator=generator)
        return
    yield weight.name, numbers.normal_(0, FP8_STD, generator=generator).to(torch.float8_e4m3fn)
    blocks = [math.ceil(size / FP8_BLOCK) for size in weight.shape]
    yield f'{weight.name}_scale_inv', torch.full(blocks, std / FP8_STD, device=generator.device)


def _distribution(weight: Weight) -> tuple[float, float]:
    """Standard deviation and mean."""
    name, shape = weight.name, weight.shape
    if weight.norm is not None:
        return 0.1, weight.norm
    if name.endswith('e_score_correction_bias'):
        return 0.0, 0.0
    if name.endswith('dt_bias'):
        return 1.0, -2.0
    if name.endswith(('A_log', '_base', 'compress_ape', 'conv1d.weight')):
        return 0.5, 0.0
    if name.endswith('_scale'):
        return 0.1, 1.0
    if name.endswith('embed_tokens.weight'):
        return 1.0, 0.0
    if len(shape) == 1:
        return 0.1, 0.0
    fan_in = shape[-1] if '.experts.' in name else math.prod(shape[1:])
    return _GAIN * (_OUTPUT_GAIN if name.endswith(_OUTPUTS) else 1.0) / math.sqrt(fan_in), 0.0
