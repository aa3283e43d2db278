"""Ranks hold all that was sampled before they go on, in whatever order gloo delivers it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.strategies.ar_spec.model_agent import ARSpecExtraInputs, ARSpecModelAgentStrategy

import replayssm.cpu
from replayssm.cpu import CpuSettings


def test_every_broadcast_of_a_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, torch.Tensor] = {
        'next_token_ids': torch.tensor([7]),
        'last_token_indices': torch.tensor([2]),
        'output_token_ids': torch.tensor([[5, 6, 7, -1]]),
        'num_rejected_tokens': torch.tensor([1]),
    }
    held = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}

    def broadcast(tensor: torch.Tensor, src: int, group: Any, async_op: bool) -> Any:
        (name,) = (name for name, ours in held.items() if ours is tensor)
        assert async_op
        assert (src, group) == (4, 'group')
        return SimpleNamespace(wait=lambda: tensor.copy_(sent[name]))

    monkeypatch.setattr(torch.distributed, 'broadcast', broadcast)
    monkeypatch.setattr(torch.distributed, 'get_global_rank', lambda group, rank: 4 + rank)
    context: Any = SimpleNamespace(attn_tp_group=SimpleNamespace(gpu_group='group'))
    extra = ARSpecExtraInputs(**{name: tensor for name, tensor in held.items() if name != 'next_token_ids'})
    strategy = ARSpecModelAgentStrategy.__new__(ARSpecModelAgentStrategy)
    replayssm.cpu.enable(CpuSettings(threads_per_rank=1))
    try:
        with strategy.broadcast_next_token(held['next_token_ids'], extra, context):
            pass
    finally:
        replayssm.cpu.disable()
    for name, tensor in sent.items():
        assert torch.equal(held[name], tensor), name
