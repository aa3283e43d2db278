"""Logits that the engine of this process samples from, recorded as they are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent

from replayssm.patching import Patches


@contextmanager
def recorded_logits() -> Iterator[list[torch.Tensor]]:
    """Yield a list that grows by the target model's float32 logits [1, rows, vocabulary] of every forward."""
    records: list[torch.Tensor] = []
    patches = Patches()

    @patches.wrap(BaseModelAgent, 'get_logits')
    def get_logits(original: Any, self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = original(self, hidden_states)
        records.append(logits.detach().float().clone())
        return logits

    try:
        yield records
    finally:
        patches.undo()
