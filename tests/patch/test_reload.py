"""Other weights in a running engine: what it says afterwards is what a fresh engine with these weights says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from lmdeploy.pytorch.engine import Engine

from replayssm import demo, patch
from replayssm.config import ReplayConfig
from replayssm.patch import Fixes, Settings

from .engine import EngineOptions, Session, generate, random_prompt, running

PREFIXES = EngineOptions('tp4', prefix_states=8, prefix_interval=16)
NUM_TOKENS = 24


pytestmark = pytest.mark.usefixtures('cpu_engine')


@pytest.fixture(scope='module')
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of model `tp4` from another seed."""
    folder = tmp_path_factory.mktemp('other')
    demo.write(replace(demo.SPECS['tp4'], seed=99), 'float32', folder)
    return folder


async def reload(engine: Engine, folder: Path) -> None:
    await engine.sleep(2)
    await patch.load_weights(engine, str(folder))


async def two_turns(engine: Engine) -> list[list[int]]:
    """Return two conversations as prompts, whose first turns the prefix cache holds."""
    prompts = [random_prompt(n) for n in (40, 70)]
    answers = await generate(engine, prompts, NUM_TOKENS)
    return [[*prompt, *answer, 33, 34] for prompt, answer in zip(prompts, answers, strict=True)]


async def begin(engine: Engine, session_id: int) -> asyncio.Task[list[int]]:
    """Start an answer that takes long, and return once it runs."""
    session = Session(engine, session_id)
    answer = asyncio.create_task(session.say(random_prompt(90, session_id), 300))
    while not (session.is_open and any(len(sequence.generated_ids) for sequence in session.sequences)):
        await asyncio.sleep(0.001)
    return answer


async def fresh_answers(options: EngineOptions, prompts: list[list[int]]) -> list[list[int]]:
    async with running(options) as engine:
        return await generate(engine, prompts, NUM_TOKENS)


@pytest.mark.parametrize(
    ('tp', 'drafts'),
    [pytest.param(1, 0, id='plain'), pytest.param(1, 3, id='mtp3'), pytest.param(2, 3, id='tp2-mtp3')],
)
async def test_reloaded_is_like_fresh(tp: int, drafts: int, other_weights: Path) -> None:
    patch.enable(ReplayConfig(16))
    options = replace(PREFIXES, num_drafts=drafts)
    async with running(replace(options, tp=tp)) as engine:
        prompts = await two_turns(engine)
        before = await generate(engine, prompts, NUM_TOKENS)
        interrupted = await begin(engine, 500)
        assert drafts or engine.scheduler.block_trie.stats.num_hit_tokens > 0
        await reload(engine, other_weights)
        assert len(await interrupted) < 300
        assert (await patch.collect(engine)).state_slots_used == 0
        after = await generate(engine, prompts, NUM_TOKENS)
        assert await generate(engine, prompts, NUM_TOKENS) == after, 'with prefixes cached since'
    assert after != before
    assert after == await fresh_answers(replace(options, folder=other_weights), prompts)


@pytest.mark.parametrize('drafts', [0, 3], ids=['plain', 'mtp3'])
async def test_asleep_at_any_moment(drafts: int) -> None:
    """The forward that was sent ahead when the sleep began belongs to nobody afterwards."""
    patch.enable(ReplayConfig(16))
    prompts = [random_prompt(20)]
    async with running(replace(PREFIXES, num_drafts=drafts, max_prefill_tokens=64)) as engine:
        expected = await generate(engine, prompts, 8)
        for moment in range(8):
            interrupted = await begin(engine, 500 + moment)
            await asyncio.sleep(0.004 * moment)
            await engine.sleep(1)
            engine.wakeup()
            assert len(await interrupted) < 300
            assert await generate(engine, prompts, 8) == expected


async def test_without_the_fix_old_prefixes_are_served(other_weights: Path) -> None:
    """On stock states, since with ReplaySSM the engine dies of records that are not there.

    Without drafts: stock LMDeploy never hits its prefix cache on these models under speculative decoding.
    """
    patch.enable(Settings(None, Fixes(sleep=False)))
    async with running(PREFIXES) as engine:
        prompts = await two_turns(engine)
        await reload(engine, other_weights)
        after = await generate(engine, prompts, NUM_TOKENS)
    assert after != await fresh_answers(replace(PREFIXES, folder=other_weights), prompts)
