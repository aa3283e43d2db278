"""ReplaySSM in LMDeploy's engine on CPU: the same logits and tokens as stock states, whatever the schedule."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from replayssm import patch
from replayssm.config import ReplayConfig
from replayssm.patch import Fixes, Settings
from replayssm.plan import RESERVED_SLOTS

from .engine import EngineOptions, Session, generate, random_prompt, running
from .logits import recorded_logits

OFF = Settings(replay=None)
ON = Settings(replay=ReplayConfig(buffer_len=16))
NO_FIXES = Fixes(**{field.name: False for field in fields(Fixes)})
RAGGED = (1, 2, 3, 7, 16, 33, 64, 65, 90, 129)
DRAFTS = pytest.mark.parametrize('drafts', [0, 3], ids=['plain', 'mtp3'])
MODELS = pytest.mark.parametrize('model', ['tiny', 'odd'])


pytestmark = pytest.mark.usefixtures('cpu_engine')


async def answers(settings: Settings, options: EngineOptions, tokens: int, lengths: tuple[int, ...] = RAGGED):
    """Greedy answers of one engine to all prompts at once, and its statistics."""
    patch.enable(settings)
    async with running(options) as engine:
        outputs = await generate(engine, [random_prompt(n) for n in lengths], tokens)
        return outputs, await patch.collect(engine)


@DRAFTS
async def test_switched_off_is_stock_bit_for_bit(drafts: int) -> None:
    options, logits = EngineOptions(num_drafts=drafts), []
    for settings in (None, Settings(None, NO_FIXES)):
        if settings is not None:
            patch.enable(settings)
        async with running(options) as engine:
            with recorded_logits() as records:
                outputs = await generate(engine, [random_prompt(n) for n in (5, 40, 70)], 40)
        logits.append((outputs, records))
    (stock, stock_logits), (off, off_logits) = logits
    assert stock == off
    assert len(stock_logits) == len(off_logits) > 10
    assert all(torch.equal(a, b) for a, b in zip(stock_logits, off_logits, strict=True))


@DRAFTS
@MODELS
async def test_logits_equal_stock_within_float32_rounding(model: str, drafts: int) -> None:
    runs = []
    for settings in (OFF, ON):
        patch.enable(settings)
        async with running(EngineOptions(model, drafts)) as engine:
            with recorded_logits() as records:
                await generate(engine, [random_prompt(50)], 200)
        runs.append(records)
    off, on = (torch.cat([r[0] for r in records]) for records in runs)
    assert off.shape == on.shape
    torch.testing.assert_close(on, off, rtol=1e-4, atol=1e-4 * float(off.abs().max()))


@DRAFTS
async def test_a_greedy_run_of_two_thousand_tokens_is_the_same(drafts: int) -> None:
    options = EngineOptions(num_drafts=drafts)
    (off, _), (on, stats) = [await answers(s, options, 2048, (50, 3)) for s in (OFF, ON)]
    assert [len(tokens) for tokens in on] == [2048, 2048]
    assert off == on
    assert stats.ranks[0].flushes > 200


@DRAFTS
@MODELS
async def test_continuous_batching_with_ragged_lengths(model: str, drafts: int) -> None:
    options = EngineOptions(model, drafts, max_batch_size=4, max_prefill_tokens=64)
    (off, _), (on, stats) = [await answers(s, options, 60) for s in (OFF, ON)]
    assert off == on
    assert stats.state_slots_used == 0


@pytest.mark.parametrize('buffer_len', [1, 4, 5, 32])
async def test_any_buffer_length(buffer_len: int) -> None:
    drafts = 0 if buffer_len < 4 else 3
    options, settings = EngineOptions(num_drafts=drafts), Settings(ReplayConfig(buffer_len))
    assert (await answers(settings, options, 80))[0] == (await answers(OFF, options, 80))[0]


async def test_seven_drafts() -> None:
    options = EngineOptions(num_drafts=7)
    assert (await answers(ON, options, 80))[0] == (await answers(OFF, options, 80))[0]


@DRAFTS
async def test_preempted_sequences_resume_with_the_same_tokens(drafts: int) -> None:
    undisturbed = EngineOptions(num_drafts=drafts)
    scarce = EngineOptions(num_drafts=drafts, num_blocks=34)
    expected, _ = await answers(ON, undisturbed, 100)
    resumed, stats = await answers(ON, scarce, 100)
    assert resumed == expected
    assert stats.invalidations['preemption'] > 0
    assert stats.recomputed_tokens['preemption'] > 0


@pytest.mark.parametrize('interval', [0, 16], ids=['prefill-saves', 'decode-saves'])
async def test_prefix_checkpoints_with_pending_records_continue_identically(interval: int) -> None:
    """Second turns restore a slot copied at a block boundary, in mid-ring when decode steps save it.

    Without drafts: stock LMDeploy never hits its prefix cache on these models under speculative decoding.
    """
    cached = EngineOptions(prefix_states=8, prefix_interval=interval)
    plain = EngineOptions()
    prompts = [random_prompt(n) for n in (70, 130)]

    async def two_turns(options: EngineOptions) -> tuple[list[list[int]], float]:
        patch.enable(ON)
        async with running(options) as engine:
            first = await generate(engine, prompts, 60)
            again = [[*p, *a, 33, 34] for p, a in zip(prompts, first, strict=True)]
            second = await generate(engine, again, 60)
            return first + second, engine.scheduler.block_trie.stats.hit_rate()

    (expected, _), (tokens, hit_rate) = await two_turns(plain), await two_turns(cached)
    assert tokens == expected
    assert hit_rate > 0


@DRAFTS
async def test_recycled_slots_full_of_nan_give_what_fresh_ones_give(drafts: int) -> None:
    patch.enable(ON)
    async with running(EngineOptions(num_drafts=drafts, max_batch_size=2)) as engine:
        prompts = [random_prompt(n) for n in (9, 40, 21)]
        fresh = await generate(engine, prompts, 40)
        for cache in engine.executor.model_agent.state_cache_engine.state_caches:
            cache.fill_(float('nan') if cache.is_floating_point() else 99)
        assert await generate(engine, prompts, 40) == fresh


@DRAFTS
async def test_an_aborted_answer_leaves_its_slot_reusable(drafts: int) -> None:
    patch.enable(ON)
    prompt = random_prompt(30)
    async with running(EngineOptions(num_drafts=drafts, max_batch_size=2)) as engine:
        expected = await generate(engine, [prompt], 50)
        for i in range(8):
            session = Session(engine, 10 + i)
            await session.say(random_prompt(20 + i), 200, leave_after=3 + i)
            await session.end()
        assert await generate(engine, [prompt], 50) == expected
        stats = await patch.collect(engine)
        assert stats.state_slots_used == 0


async def test_caches_rebuilt_after_sleep_hold_no_stale_state() -> None:
    patch.enable(ON)
    prompts = [random_prompt(n) for n in (9, 40, 21)]
    async with running(EngineOptions(num_drafts=3)) as engine:
        expected = await generate(engine, prompts, 40)
        await engine.sleep(1)
        assert (await patch.collect(engine)).ranks[0].state_bytes == {}
        engine.wakeup()
        assert await generate(engine, prompts, 40) == expected


async def test_cursors_advance_once_per_forward() -> None:
    """Tokens after the first of every answer, each appended once however many layers there are."""
    patch.enable(ON)
    async with running(EngineOptions()) as engine:
        with recorded_logits() as records:
            await generate(engine, [random_prompt(20)], 64)
        (rank,) = (await patch.collect(engine)).ranks
    decodes = len(records) - 1
    assert rank.records == rank.windows == rank.decode_steps == decodes >= 63
    assert rank.flushes == (decodes - 1) // 16
    assert rank.rejected_records == 0
    # A checkpoint ages from 0 to 16 tokens, and is one token old in the step after its flush.
    assert rank.replayed_records == sum(1 + (age - 1) % 16 if age else 0 for age in range(decodes))


async def test_rejected_drafts_are_rolled_back_records() -> None:
    _, stats = await answers(ON, EngineOptions(num_drafts=3), 64, (20, 30))
    (rank,) = stats.ranks
    assert rank.records == 4 * rank.decode_steps * 2 or rank.records % 4 == 0
    assert 0 < rank.rejected_records < rank.records * 3 / 4
    assert rank.records == 4 * rank.windows


@pytest.mark.parametrize('settings', [OFF, ON], ids=['off', 'on'])
async def test_accepted_drafts_account_for_every_token(settings: Settings) -> None:
    tokens, prompts = 64, (20, 30)
    _, stats = await answers(settings, EngineOptions(num_drafts=3), tokens, prompts)
    assert len(stats.accepted_drafts) == 4
    committed = sum((1 + accepted) * windows for accepted, windows in enumerate(stats.accepted_drafts))
    # A prefill gives the first token; the last window may reach beyond the limit.
    assert 0 <= committed - len(prompts) * (tokens - 1) <= len(prompts) * 3


async def test_traffic_follows_the_layout() -> None:
    _, stats = await answers(ON, EngineOptions(num_drafts=3), 64, (20, 30))
    (rank,) = stats.ranks
    slots = EngineOptions().max_batch_size + RESERVED_SLOTS
    checkpoint_bytes, record_bytes = rank.state_bytes['checkpoint'] // slots, rank.state_bytes['ring'] / slots / 20
    assert rank.stock_traffic_bytes == (rank.windows + rank.records) * checkpoint_bytes
    records = rank.records + rank.replayed_records
    # Slots are padded, traffic is not.
    assert rank.traffic_bytes == pytest.approx(
        (rank.windows + rank.flushes) * checkpoint_bytes + records * record_bytes, rel=0.02
    )


async def test_without_drafts_nothing_is_accepted_or_refused() -> None:
    _, stats = await answers(ON, EngineOptions(), 8, (20,))
    assert stats.accepted_drafts == ()


async def test_bfloat16_runs() -> None:
    outputs, stats = await answers(ON, EngineOptions(dtype='bfloat16', num_drafts=3), 30, (5, 40))
    assert [len(tokens) for tokens in outputs] == [30, 30]
    assert stats.ranks[0].flushes > 0
