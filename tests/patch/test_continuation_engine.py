"""Preemption and conversations in the whole engine: the same tokens as a run that nothing disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from lmdeploy.pytorch.engine import Engine
from lmdeploy.pytorch.engine.request import RequestType

from replayssm.patch import continuation, mrope
from replayssm.stats import counters_of

from .engine import EngineOptions, Session, few_blocks, generate, random_prompt, running
from .scheduling import STOCK_AND_FIXED, installed

pytestmark = pytest.mark.asyncio(loop_scope='module')

PLAIN = pytest.param(EngineOptions('odd', prefill_interval=2), id='plain')
DRAFTS_WRONG = pytest.param(EngineOptions('odd', num_drafts=3, prefill_interval=2), id='mtp3-rejected')
DRAFTS_PARTLY_RIGHT = pytest.param(EngineOptions('tiny', num_drafts=3, prefill_interval=2), id='mtp3-accepted')

PROMPTS = [random_prompt(5 + 7 * index % 40, index) for index in range(24)]
NUM_TOKENS = 50
BLOCK_LIMITS = (20, 34)

LEAVES = ('stop-word', 'max-tokens', 'abort', 'session-end')
FIRST_ANSWER = range(9, 15)
"""Lengths of the first answers, consecutive so that some end in the middle of accepted drafts."""
WHOLE_ANSWER = 45
"""Long enough that nobody is done before the request that cuts the answer short."""

NEW_INPUT = (33, 44, 55)


@pytest_asyncio.fixture(scope='module', loop_scope='module')
async def engine(request: pytest.FixtureRequest, cpu_device: None) -> AsyncIterator[Engine]:
    """An engine that reserves few KV blocks ahead, so that short answers meet the limit."""
    async with running(request.param) as engine:
        yield engine


@pytest_asyncio.fixture(scope='module', loop_scope='module')
async def undisturbed(engine: Engine) -> list[list[int]]:
    """The answers to PROMPTS with room for everyone."""
    return await generate(engine, PROMPTS, NUM_TOKENS)


@STOCK_AND_FIXED
@pytest.mark.parametrize('engine', [PLAIN, DRAFTS_WRONG], indirect=True)
async def test_preemption_in_mid_answer(
    engine: Engine, undisturbed: list[list[int]], fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[Any] = []
    preempt = engine.scheduler.preempt_seqs
    monkeypatch.setattr(engine.scheduler, 'preempt_seqs', lambda seqs: (preempted.extend(seqs), preempt(seqs)))
    before = counters_of(engine.scheduler).invalidations.total()
    wrong = {}
    for limit in BLOCK_LIMITS:
        preempted.clear()
        with installed(continuation, mrope, when=fixed), few_blocks(engine, limit):
            answers = await generate(engine, PROMPTS, NUM_TOKENS)
        assert preempted, f'{limit} blocks are enough for everyone'
        wrong[limit] = sum(answer != expected for answer, expected in zip(answers, undisturbed, strict=True))
    if fixed:
        assert not any(wrong.values()), f'wrong answers of {len(PROMPTS)} by number of blocks: {wrong}'
        assert counters_of(engine.scheduler).invalidations.total() > before
    else:
        assert any(wrong.values())


@STOCK_AND_FIXED
@pytest.mark.parametrize('leave', LEAVES)
@pytest.mark.parametrize('engine', [PLAIN, DRAFTS_PARTLY_RIGHT], indirect=True)
async def test_a_second_turn_continues_the_first(engine: Engine, leave: str, fixed: bool) -> None:
    prompts = [random_prompt(20 + length, length) for length in FIRST_ANSWER]
    sessions = [Session(engine, index) for index in range(len(prompts))]
    with installed(continuation, mrope, when=fixed):
        whole_answers = await generate(engine, prompts, WHOLE_ANSWER)
        first = await asyncio.gather(
            *(_first_turn(*turn, leave) for turn in zip(sessions, prompts, whole_answers, FIRST_ANSWER, strict=True))
        )
        second = await asyncio.gather(*(_second_turn(*turn) for turn in zip(sessions, prompts, first, strict=True)))
        aligned = [_is_aligned(session) for session in sessions]
        await asyncio.gather(*(session.end() for session in sessions))
        histories = [[*prompt, *answer, *NEW_INPUT] for prompt, answer in zip(prompts, first, strict=True)]
        expected = await generate(engine, histories, 12)
    for answer, whole in zip(first, whole_answers, strict=True):
        assert answer == whole[: len(answer)] != whole
    if fixed or leave == 'session-end':
        assert second == expected
        assert all(aligned)
    else:
        assert second != expected


async def _first_turn(session: Session, prompt: list[int], whole: list[int], length: int, leave: str) -> list[int]:
    match leave:
        case 'stop-word':
            return await session.say(prompt, len(whole), stop_words=[whole[length - 1]])
        case 'max-tokens':
            return await session.say(prompt, length)
        case 'abort':
            return await session.say(prompt, len(whole), leave_after=length)
        case 'session-end':
            return await session.say(prompt, len(whole), leave_after=length, leave_by=RequestType.END_SESSION)
    raise ValueError(leave)


async def _second_turn(session: Session, prompt: list[int], answer: list[int]) -> list[int]:
    """Say NEW_INPUT; a session that was ended keeps nothing and needs the history as well."""
    history = [] if session.is_open else [*prompt, *answer]
    return await session.say([*history, *NEW_INPUT], 12)


def _is_aligned(session: Session) -> bool:
    """Tell whether every token has its mrope row; for text the position is the index."""
    sequence = session.sequence
    count = int(sequence.num_valid_ids)
    rows = sequence.history_mrope_pos_ids.get_real()
    return len(rows) >= count and bool((rows[:count] == np.arange(count)[:, None]).all())
