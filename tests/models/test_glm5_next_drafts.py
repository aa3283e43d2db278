"""GLM-5.3-Flash's drafts in LMDeploy's engine on CPU, against its draft layer without a cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lmdeploy.pytorch.spec_decode.spec_agent import SpecModelAgent

import replayssm.cpu
from replayssm import demo, patch
from replayssm.config import ReplayConfig
from replayssm.cpu import CpuSettings
from replayssm.models.glm5_next.indexer import SharedSelection
from replayssm.patching import Patches
from tests.patch.engine import EngineOptions, generate, random_prompt, running

from .draft_reference import DraftReference

DRAFTS = 3


@pytest.fixture(autouse=True)
def cpu_engine() -> Iterator[None]:
    replayssm.cpu.enable(CpuSettings(threads_per_rank=1))
    patch.enable(ReplayConfig(16))
    yield
    patch.disable()
    replayssm.cpu.disable()


class Proposal(NamedTuple):
    """What one step's drafts were made of: all accepted tokens and the hidden states that come with them."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    drafts: list[int]


@contextmanager
def recorded_proposals() -> Iterator[list[Proposal]]:
    """Yield a list that grows by what the engine drafts for its only sequence."""
    proposals: list[Proposal] = []
    tokens, hidden = torch.empty(0, dtype=torch.long), torch.empty(0)
    patches = Patches()

    @patches.wrap(SpecModelAgent, '_async_autoregressive_model_forward')
    async def forward(original: Any, self: Any, inputs: Any, extra_inputs: Any, sampling: Any) -> Any:
        nonlocal tokens, hidden
        before, accepted = int(inputs.history_lengths[0]), int(extra_inputs.last_token_indices[0]) + 1
        new_tokens, new_hidden = (
            inputs.input_ids[0, :accepted].clone(),
            inputs.target_hidden_states[0, :accepted].clone(),
        )
        result = await original(self, inputs, extra_inputs, sampling)
        if not inputs.is_dummy:
            tokens = torch.cat([tokens[:before], new_tokens])
            hidden = torch.cat([hidden[:before].view(before, -1), new_hidden]) if before else new_hidden
            proposals.append(Proposal(tokens, hidden, result.output_draft_token_ids[0].tolist()))
        return result

    try:
        yield proposals
    finally:
        patches.undo()


def without_sharing(folder: Path, target: Path) -> Path:
    """Write a checkpoint with `index_share_for_mtp_iteration` off beside the one in `folder`."""
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    config = json.loads((folder / 'config.json').read_text())
    del config['text_config']['index_share_for_mtp_iteration']
    (target / 'config.json').unlink()
    (target / 'config.json').write_text(json.dumps(config))
    return target


@pytest.mark.parametrize('is_shared', [True, False], ids=['shared', 'own'])
async def test_drafts_equal_the_layer_without_a_cache(is_shared: bool, tmp_path: Path) -> None:
    """`glm_odd` has a draft layer of random weights, so that what it attends to shows in its drafts."""
    folder = demo.ensure('glm_odd')
    folder = folder if is_shared else without_sharing(folder, tmp_path)
    async with running(EngineOptions('glm_odd', DRAFTS, folder=folder)) as engine:
        with recorded_proposals() as proposals:
            await generate(engine, [random_prompt(61)], 16)
    reference = DraftReference(folder)
    others = 0
    assert len(proposals) > 10
    for tokens, hidden, drafts in proposals:
        expected, margin = reference.drafts(tokens, hidden, DRAFTS, is_shared)
        assert margin > 1e-4, 'no margin between drafts'
        assert drafts == expected
        others += reference.drafts(tokens, hidden, DRAFTS, not is_shared)[0] != expected
    # a test that passes whatever is attended to would say nothing
    assert others > 2


def test_a_shared_choice_is_that_of_each_sequence() -> None:
    """Prompts of different lengths first, then one group of a decode step; later steps see more cached tokens."""
    shared = SharedSelection()
    short, long = torch.rand(1, 3, 8) < 0.5, torch.rand(1, 2, 16) < 0.5
    shared.record(short)
    shared.record(long)
    shared.keep(torch.tensor([2, 4]))
    reused = shared.reuse(20)
    assert reused.shape == (2, 1, 20)
    assert torch.equal(reused[0, 0, :8], short[0, 2])
    assert torch.equal(reused[1, 0, :16], long[0, 1])
    assert not reused[0, 0, 8:].any()
    assert not reused[1, 0, 16:].any()
    shared.begin()
    with pytest.raises(RuntimeError, match='there was none'):
        shared.reuse(20)
    window = torch.rand(2, 4, 24) < 0.5
    shared.record(window)
    shared.keep(torch.tensor([1, 7]))
    assert torch.equal(shared.reuse(24)[:, 0], window[[0, 1], [1, 3]])
