"""Whatever number of drafts is accepted, GLM-5.3-Flash holds and computes what it does without drafts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.backends.default.rejection_sampling import DefaultRejectionSamplingImpl
from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor

from replayssm import patch
from replayssm.config import ReplayConfig
from replayssm.patch import Settings, forced_acceptance
from replayssm.patching import Patches
from tests.patch.engine import EngineOptions, generate, random_prompt, running

from .held_state import Step, recorded_steps

MODEL, DRAFTS, PROMPT, TOKENS = 'glm_odd', 3, random_prompt(21), 60
"""Its drafts are nothing that the target would say, so accepting them leads where no greedy answer goes."""
TOLERANCE = 1e-4
"""Of the largest value: a window and single steps add up in different orders."""


pytestmark = pytest.mark.usefixtures('cpu_engine')


@contextmanager
def told_what_to_say(tokens: list[int]) -> Iterator[None]:
    """Make an engine without drafts answer its only request with `tokens`."""
    patches, rest = Patches(), iter(tokens)

    @patches.wrap(FusedLogitsProcessor, 'sampling')
    def sampling(original: Any, self: Any, logits: torch.Tensor) -> torch.Tensor:
        sampled: torch.Tensor = original(self, logits)
        return torch.full_like(sampled, next(rest, 0))

    try:
        yield
    finally:
        patches.undo()


async def run(settings: Settings, drafts: int) -> tuple[list[int], list[Step]]:
    patch.enable(settings)
    async with running(EngineOptions(MODEL, drafts)) as engine:
        with recorded_steps() as steps:
            (tokens,) = await generate(engine, [PROMPT], TOKENS)
    return tokens, steps


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.shape == expected.shape, what
    largest = float(expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * largest, msg=lambda text: f'{what}: {text}')


@pytest.mark.parametrize(
    ('shares', 'replay'),
    [
        pytest.param((1.0,), ReplayConfig(16), id='0'),
        pytest.param((0.0, 1.0), ReplayConfig(16), id='1'),
        pytest.param((0.0, 0.0, 1.0), ReplayConfig(16), id='2'),
        pytest.param((0.0, 0.0, 0.0, 1.0), ReplayConfig(16), id='3'),
        pytest.param((0.25, 0.25, 0.25, 0.25), ReplayConfig(16), id='any'),
        pytest.param((0.25, 0.25, 0.25, 0.25), None, id='any-stock-states'),
    ],
)
async def test_accepted_drafts_leave_what_their_tokens_alone_would(
    shares: tuple[float, ...], replay: ReplayConfig | None
) -> None:
    patches = Patches()
    forced_acceptance.install(patches, shares, verification=DefaultRejectionSamplingImpl)
    try:
        tokens, drafted = await run(Settings(replay), DRAFTS)
    finally:
        patches.undo()
    with told_what_to_say(tokens):
        said, plain = await run(Settings(None), 0)
    assert said == tokens
    alone = {step.held.tokens: step for step in plain}
    compared = [step for step in drafted if step.held.tokens in alone]
    advances = {b.held.tokens - a.held.tokens for a, b in itertools.pairwise(compared)}
    assert advances == {1 + count for count, share in enumerate(shares) if share}
    for here, following in itertools.pairwise(compared):
        at = here.held.tokens
        expected = alone[at].held
        for kind in ('recurrent', 'conv', 'tail', 'pools', 'latents'):
            layers = zip(getattr(here.held, kind), getattr(expected, kind), strict=True)
            for layer, (ours, theirs) in enumerate(layers):
                assert_close(ours, theirs, f'{kind} of layer {layer} at {at} tokens')
        for row in range(following.held.tokens - at):
            assert_close(here.logits[row], alone[at + row].logits[0], f'logits of token {at + row}')
