"""Weights drawn at random in place of a checkpoint's files, through the loading that the files would go through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lmdeploy.pytorch.weight_loader.model_weight_loader import ModelWeightLoader
from transformers import AutoConfig

from replayssm.patching import Patches
from replayssm.random_weights import draw, weights_of

_DRAFT_MODELS = frozenset({'Glm5NextDraftModel', 'Qwen3_5MTPModel'})


def install(patches: Patches) -> None:
    """Replace what reads files; folders then need a config.json and a tokenizer."""

    def init(self: Any, model_path: str, prefix: str | None = None) -> None:
        self.model_path, self._prefix = model_path, prefix
        self._shard_paths = (model_path,)

    @patches.wrap(ModelWeightLoader, 'load_model_weights')
    def load_model_weights(load: Any, self: Any, model: torch.nn.Module, device: torch.device | None = None) -> None:
        self._model = model
        load(self, model, device=device)

    patches.set(ModelWeightLoader, '__init__', init)
    patches.set(ModelWeightLoader, '_get_weights_iterator', lambda self, path: _weights(path, self._model))


def _weights(folder: str, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Draw what `model` loads, where it has its parameters."""
    config = AutoConfig.from_pretrained(folder)
    dtype = config.get_text_config().dtype or torch.bfloat16
    is_draft = type(model).__name__ in _DRAFT_MODELS
    generator = torch.Generator(next(model.parameters()).device)
    for weight in weights_of(config):
        if weight.is_draft == is_draft:
            yield from draw(weight, dtype, generator)
