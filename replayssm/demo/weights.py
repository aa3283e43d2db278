"""Deterministic random weights with usable logit margins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from replayssm.demo.specs import DemoSpec

_OUTPUT_PROJECTIONS = ('o_proj.weight', 'out_proj.weight', 'down_proj.weight', 'experts.down_proj')
_HEAD_GAIN = 2.0
_UNREADABLE_GAIN = 0.05
_DRAFT_HIDDEN_GAIN = 0.1
_DRAFT_LAYER_GAIN = 0.05


def build_weights(
    spec: DemoSpec, shapes: Mapping[str, torch.Size], readable_tokens: Iterable[int]
) -> dict[str, torch.Tensor]:
    """Return float32 weights for the target's `shapes` and the draft layer, by checkpoint name.

    Args:
        readable_tokens: the only tokens that the model is likely to emit.
    """
    weights = {name: _target_weight(spec, name, shape) for name, shape in shapes.items()}
    row_gain = torch.full((weights['lm_head.weight'].size(0), 1), _UNREADABLE_GAIN)
    row_gain[list(readable_tokens)] = 1.0
    weights['lm_head.weight'] *= _HEAD_GAIN * row_gain
    # The draft layer is a full-attention layer like the target's last one.
    last_layer = f'model.language_model.layers.{spec.num_layers - 1}.'
    for name, shape in shapes.items():
        if name.startswith(last_layer):
            draft_name = 'mtp.layers.0.' + name.removeprefix(last_layer)
            weights[draft_name] = _draft_weight(spec, draft_name, shape)
    hidden_size = spec.hidden_size
    for name in ('norm', 'pre_fc_norm_hidden', 'pre_fc_norm_embedding'):
        weights[f'mtp.{name}.weight'] = torch.zeros(hidden_size)
    weights['mtp.fc.weight'] = _random(spec, 'mtp.fc.weight', torch.Size((hidden_size, 2 * hidden_size)))
    if spec.draft_follows_target:
        # Next to the embedding of the current token the hidden state adds little, as in the target.
        identity = torch.eye(hidden_size)
        weights['mtp.fc.weight'] = torch.cat((identity, _DRAFT_HIDDEN_GAIN * identity), dim=1)
        weights['mtp.norm.weight'] = weights['model.language_model.norm.weight'].clone()
    return weights


def _target_weight(spec: DemoSpec, name: str, shape: torch.Size) -> torch.Tensor:
    weight = _random(spec, name, shape)
    return weight * spec.layer_gain if name.endswith(_OUTPUT_PROJECTIONS) else weight


def _draft_weight(spec: DemoSpec, name: str, shape: torch.Size) -> torch.Tensor:
    weight = _random(spec, name, shape)
    if spec.draft_follows_target and name.endswith(_OUTPUT_PROJECTIONS):
        return weight * _DRAFT_LAYER_GAIN
    return weight


def named_normal(seed: int, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return normal numbers that depend on the seed and the weight's name only."""
    return torch.randn(tuple(shape), generator=_generator(f'{seed}:{name}'))


def _generator(text: str) -> torch.Generator:
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], 'little', signed=True))


def _random(spec: DemoSpec, name: str, shape: torch.Size) -> torch.Tensor:
    """Return a weight that depends on the seed and its own name only."""
    generator = _generator(f'{spec.seed}:{name}')
    normal = torch.randn(shape, generator=generator)
    if name.endswith('A_log'):
        return torch.rand(shape, generator=generator) * 2
    if name.endswith('dt_bias'):
        return normal - 2
    if name.endswith('linear_attn.norm.weight'):
        return 1 + 0.1 * normal
    if name.endswith('embed_tokens.weight'):
        return normal
    if len(shape) == 1:
        return 0.1 * normal
    fan_in = shape[-1] if '.experts.' in name else shape[1:].numel()
    return normal * (1.5 / fan_in**0.5)
