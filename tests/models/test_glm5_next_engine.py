"""GLM-5.3-Flash in LMDeploy's engine on CPU: transformers' logits, whatever the schedule, the drafts and the states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.spec_decode.spec_agent import SpecModelAgent

from replayssm import demo, patch
from replayssm.config import ReplayConfig
from replayssm.layout import slot_bytes
from replayssm.patch import Settings
from replayssm.patching import Patches
from tests.patch.engine import EngineOptions, generate, random_prompt, running
from tests.patch.logits import recorded_logits

from .transformers_logits import reference_logits

OFF, ON = Settings(replay=None), Settings(replay=ReplayConfig(buffer_len=16))
DRAFTS = pytest.mark.parametrize('drafts', [0, 3], ids=['plain', 'mtp3'])
BOUNDARIES = (1, 3, 4, 5, 8, 17, 20, 65)
"""Around a pool of 4, the 16 tokens that a query attends to at most, a chunk of the delta rule, and a page."""


pytestmark = pytest.mark.usefixtures('cpu_engine')


async def answers(settings: Settings, options: EngineOptions, tokens: int, lengths: tuple[int, ...]) -> Any:
    """Greedy answers of one engine to all prompts at once, and its statistics."""
    patch.enable(settings)
    async with running(options) as engine:
        outputs = await generate(engine, [random_prompt(n) for n in lengths], tokens)
        return outputs, await patch.collect(engine)


@contextmanager
def recorded_rejections() -> Iterator[set[int]]:
    """Yield the set of how many drafts of a window the target has rejected; it grows."""
    seen: set[int] = set()
    patches = Patches()

    @patches.wrap(SpecModelAgent, '_rejection_sampling')
    async def rejection_sampling(original: Any, self: Any, model_inputs: Any, *rest: Any) -> Any:
        extra = await original(self, model_inputs, *rest)
        if model_inputs.is_decoding and not model_inputs.is_dummy:
            seen.update(extra.num_rejected_tokens.tolist())
        return extra

    try:
        yield seen
    finally:
        patches.undo()


async def test_logits_equal_transformers() -> None:
    """Prompt and 40 decoded tokens of the odd sizes: every layer type, sparse attention, clamped experts."""
    patch.enable(ON)
    prompt = random_prompt(50)
    async with running(EngineOptions('glm_odd')) as engine:
        with recorded_logits() as records:
            (tokens,) = await generate(engine, [prompt], 40)
    folder = str(demo.ensure('glm_odd'))
    expected = reference_logits({folder: [prompt + tokens]})[folder][0][len(prompt) - 1 : -1]
    logits = torch.cat([record[0] for record in records])[:40]
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert expected.argmax(-1).tolist() == tokens


@DRAFTS
async def test_ragged_batches_and_chunked_prompts_give_transformers_tokens(drafts: int) -> None:
    """Chunks of 32 tokens shared by a batch split prompts off multiples of 4 and of the chunk."""
    options = EngineOptions('glm', drafts, max_batch_size=4, max_prefill_tokens=32)
    outputs, stats = await answers(ON, options, 12, BOUNDARIES)
    folder, prompts = str(demo.ensure('glm')), [random_prompt(n) for n in BOUNDARIES]
    expected = reference_logits({folder: [p + o for p, o in zip(prompts, outputs, strict=True)]})[folder]
    for prompt, tokens, logits in zip(prompts, outputs, expected, strict=True):
        best = logits[len(prompt) - 1 : -1].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-4, 'no margin between tokens'
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    assert stats.state_slots_used == 0


@DRAFTS
async def test_two_thousand_tokens_are_the_same_with_stock_states(drafts: int) -> None:
    options, tokens = EngineOptions('glm', drafts), 500 if drafts == 0 else 150
    with recorded_rejections() as rejections:
        (off, _), (on, stats) = [await answers(s, options, tokens, (50, 3, 18, 31)) for s in (OFF, ON)]
    assert on == off
    assert [len(answer) for answer in on] == [tokens] * 4
    assert stats.ranks[0].flushes > 4 * tokens // 20
    # every count of accepted drafts was taken back and continued from
    assert rejections == (set(range(4)) if drafts else set())


async def test_drafts_that_are_always_wrong_change_no_token() -> None:
    (plain, _), (drafted, _) = [await answers(ON, EngineOptions('glm_odd', n), 20, (3, 18)) for n in (0, 3)]
    assert drafted == plain


@DRAFTS
async def test_recycled_slots_and_pages_full_of_nan_give_what_fresh_ones_give(drafts: int) -> None:
    patch.enable(ON)
    async with running(EngineOptions('glm', drafts, max_batch_size=2, num_blocks=64)) as engine:
        prompts = [random_prompt(n) for n in (9, 40, 21)]
        fresh = await generate(engine, prompts, 20)
        agent = engine.executor.model_agent
        pages = [cache for layer in agent.cache_engine.gpu_cache for cache in layer]
        for cache in (*agent.state_cache_engine.state_caches, *pages):
            cache.fill_(float('nan') if cache.is_floating_point() else 99)
        assert await generate(engine, prompts, 20) == fresh


async def test_prefix_checkpoints_restore_conv_states_records_tails_and_index_together() -> None:
    cached = EngineOptions('glm', prefix_states=8)
    prompts = [random_prompt(n) for n in (70, 30)]

    async def two_turns(options: EngineOptions) -> tuple[list[list[int]], float]:
        patch.enable(ON)
        async with running(options) as engine:
            first = await generate(engine, prompts, 30)
            again = [[*p, *a, 33, 34] for p, a in zip(prompts, first, strict=True)]
            second = await generate(engine, again, 30)
            return first + second, engine.scheduler.block_trie.stats.hit_rate()

    (expected, _), (tokens, hit_rate) = await two_turns(EngineOptions('glm')), await two_turns(cached)
    assert tokens == expected
    assert hit_rate > 0


async def test_preempted_sequences_resume_with_the_same_tokens() -> None:
    lengths = (20, 33, 40, 47)
    expected, _ = await answers(ON, EngineOptions('glm', 3), 80, lengths)
    resumed, stats = await answers(ON, EngineOptions('glm', 3, num_blocks=18), 80, lengths)
    assert resumed == expected
    assert stats.invalidations['preemption'] > 0


@pytest.mark.parametrize('settings', [OFF, ON], ids=['stock', 'replay'])
async def test_state_bytes_are_what_is_allocated(settings: Settings) -> None:
    patch.enable(settings)
    async with running(EngineOptions('glm', 3)) as engine:
        await generate(engine, [random_prompt(9)], 4)
        (rank,) = (await patch.collect(engine)).ranks
        layout, slots = engine.model_config.state_layout, engine.cache_config.num_state_caches
    tensors = layout.tensors() if settings is ON else layout.stock_tensors()
    assert sum(rank.state_bytes.values()) == slots * slot_bytes(tensors)
    assert rank.state_bytes['index'] > 0
    assert rank.state_bytes['checkpoint'] == slots * 6 * 4 * 32 * 32 * 4 * (1 if settings is ON else 4)
