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

from replayssm import demo
from replayssm.models.glm5_next.indexer import SharedSelection
from replayssm.patching import Patches
from tests.patch.engine import EngineOptions, generate, random_prompt, running

from .draft_reference import DraftReference

DRAFTS = 3


pytestmark = pytest.mark.usefixtures('replaying_engine')


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
    """Prompts of different lengths first, then one group of a decode step, then a prompt longer than any before."""
    shared, device = SharedSelection(12), torch.device('cpu')
    shared.begin(5, 8, device)
    short, long = torch.randint(0, 99, (1, 3, 8)), torch.randint(0, 99, (1, 2, 12))
    shared.record(slice(0, 3), short)
    shared.record(slice(3, 5), long)
    shared.keep(torch.tensor([2, 4]))
    shared.begin(2, 8, device)
    reused = shared.reuse(2)
    address = reused.data_ptr()
    assert reused.tolist() == [[[*short[0, 2].tolist(), -1, -1, -1, -1]], [long[0, 1].tolist()]]
    window = torch.randint(0, 99, (2, 4, 12))
    shared.begin(8, 8, device)
    shared.record(slice(0, 8), window)
    shared.keep(torch.tensor([1, 7]))
    assert torch.equal(shared.reuse(2)[:, 0], window[[0, 1], [1, 3]].int())
    prompt = torch.randint(0, 99, (1, 20, 12))
    shared.begin(20, 8, device)
    shared.record(slice(0, 20), prompt)
    shared.keep(torch.tensor([19]))
    assert torch.equal(shared.reuse(1)[:, 0], prompt[:, 19].int())
    assert shared.reuse(1).data_ptr() == address, 'a CUDA graph would read what nobody writes'
