"""ReplaySSM on several tensor-parallel ranks, each in a process that Ray starts."""

from __future__ import annotations

import pytest
from lmdeploy.pytorch.engine import Engine

from replayssm import patch
from replayssm.stats import ReplayStats

from .engine import EngineOptions, generate, random_prompt, running

PROMPTS = [random_prompt(n) for n in (5, 40, 66)]


pytestmark = pytest.mark.usefixtures('replaying_engine')


async def settled(engine: Engine) -> ReplayStats:
    """Statistics once the forward that the engine sent ahead has ended on every rank."""
    before = await patch.collect(engine)
    while (stats := await patch.collect(engine)) != before:
        before = stats
    return stats


@pytest.mark.parametrize(('tp', 'drafts'), [(2, 0), (4, 3)], ids=['tp2', 'tp4-mtp3'])
async def test_ranks_agree_with_a_single_process(tp: int, drafts: int) -> None:
    async with running(EngineOptions('tp4', drafts)) as engine:
        expected = await generate(engine, PROMPTS, 40)
        whole = (await patch.collect(engine)).ranks[0]
    async with running(EngineOptions('tp4', drafts, tp=tp)) as engine:
        assert await generate(engine, PROMPTS, 40) == expected
        stats = await settled(engine)
    assert [rank.rank for rank in stats.ranks] == list(range(tp))
    for rank in stats.ranks:
        assert rank.flushes == stats.ranks[0].flushes > 0
        assert rank.records == stats.ranks[0].records > 0
        assert rank.state_bytes['checkpoint'] * tp == whole.state_bytes['checkpoint']
        assert rank.stock_bytes < whole.stock_bytes
