"""Checkpoint names and formats: BF16, and FP8 in blocks of 128 x 128."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch
from lmdeploy.pytorch.weight_loader.model_weight_loader import load_weight
from torch import nn

FP8_BLOCK = 128

_RENAMED = (('hc_attn_', 'attn_hc.'), ('hc_ffn_', 'ffn_hc.'))
_STACKED = (('.gate_proj.', '.gate_up_proj.', 0), ('.up_proj.', '.gate_up_proj.', 1))
_EXPERT = re.compile(r'(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(.*)')
_CONV = re.compile(r'(.*)\.([qkv])_conv1d\.weight')


def load(module: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], own_name: Callable[[str], str | None]) -> None:
    """Load a checkpoint's `weights` into `module`.

    Args:
        own_name: the module's name of a weight of the checkpoint, None for what it does not hold.

    Raises:
        ValueError: the checkpoint lacks a weight of the module, or has one too many; the message names it.
    """
    loader = _Loader(module)
    for checkpoint_name, weight in weights:
        name = own_name(checkpoint_name)
        if name is not None:
            loader.load(name, weight)
    loader.finish()


class _Loader:
    """Joins what the checkpoint stores apart and this package holds in one piece."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters())
        self._missing = set(self._parameters)
        self._parts: dict[str, dict[str, torch.Tensor]] = {}

    def load(self, name: str, weight: torch.Tensor) -> None:
        """Load one weight under the module's name of it."""
        for theirs, ours in _RENAMED:
            name = name.replace(theirs, ours)
        if (conv := _CONV.fullmatch(name)) is not None:
            self._join(f'{conv[1]}.conv1d.weight', conv[2], weight, 'qkv', lambda parts: torch.cat(parts))
        elif (expert := _EXPERT.fullmatch(name)) is not None:
            prefix, index, kind, rest = expert.groups()
            target = f'{prefix}.down.{rest}' if kind == 'down' else f'{prefix}.gate_up.{rest}'
            self._load(target, weight, expert_id=int(index), shard_id=kind)
        elif 'kv_b_proj.weight' in name and (weight.dtype == torch.float8_e4m3fn or name.endswith('_scale_inv')):
            part = 'scale' if name.endswith('_scale_inv') else 'weight'
            self._join(name.removesuffix('_scale_inv'), part, weight, ('weight', 'scale'), _dequantise)
        else:
            for theirs, ours, shard in _STACKED:
                if theirs in name:
                    self._load(name.replace(theirs, ours), weight, shard_id=shard)
                    return
            self._load(name, weight)

    def finish(self) -> None:
        """Raise ValueError unless every parameter was loaded."""
        if self._missing:
            names = sorted(self._missing)
            raise ValueError(f'checkpoint: {len(names)} weights are missing, the first is {names[0]}')

    def _load(self, name: str, weight: torch.Tensor, **shard: int | str) -> None:
        if name not in self._parameters:
            raise ValueError(f'checkpoint: unexpected weight {name}')
        load_weight(self._parameters[name], weight, **shard)
        self._missing.discard(name)

    def _join(
        self,
        name: str,
        part: str,
        weight: torch.Tensor,
        order: Iterable[str],
        join: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> None:
        parts = self._parts.setdefault(name, {})
        parts[part] = weight
        if len(parts) == len(list(order)):
            self._load(name, join([parts[key] for key in order]))
            del self._parts[name]


def _dequantise(parts: list[torch.Tensor]) -> torch.Tensor:
    weight, scale = parts
    rows, columns = weight.shape
    scale = scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return weight.float() * scale
