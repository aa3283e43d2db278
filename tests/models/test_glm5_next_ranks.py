"""GLM-5.3-Flash on several tensor-parallel ranks, each in a process that Ray starts."""

from __future__ import annotations

import pytest
import torch

from replayssm import patch
from replayssm.stats import ReplayStats
from tests.patch.engine import EngineOptions, generate, random_prompt, running

from .rank_records import RankRecords, on_ranks, start, stop

pytestmark = pytest.mark.usefixtures('replaying_engine')

TOP_POOLS = 4
TIE = 1e-5
"""Of the best pool's score: sums that are reordered may exchange pools which are nearer to each other."""


def pool_margin(scores: torch.Tensor) -> float:
    """How far the worst chosen pool is from the best of the others, over the best pool's score."""
    best = scores.topk(TOP_POOLS + 1).values
    return float((best[-2] - best[-1]) / best[0].abs())


async def answers(options: EngineOptions) -> tuple[list[list[int]], list[RankRecords], ReplayStats]:
    """Greedy answers, what the ranks recorded of a single prompt, and the statistics."""
    async with running(options) as engine:
        on_ranks(engine, start)
        alone = await generate(engine, [random_prompt(50)], 20)
        records = on_ranks(engine, stop)
        together = await generate(engine, [random_prompt(n) for n in (5, 40)], 20)
        return alone + together, records, await patch.collect(engine)


@pytest.mark.parametrize(('tp', 'drafts'), [(2, 0), (4, 3)], ids=['tp2', 'tp4-mtp3'])
async def test_ranks_agree_with_a_single_process(tp: int, drafts: int) -> None:
    """Sums are reordered between ranks, so the tokens are those of a model with margins between them."""
    expected, (alone,), whole = await answers(EngineOptions('glm', drafts))
    tokens, ranks, stats = await answers(EngineOptions('glm', drafts, tp=tp))
    assert tokens == expected
    assert len(ranks) == tp
    for rank in ranks:
        # the engine may have sent one forward more ahead of the end in one run than in the other, or none in either
        steps = list(zip(rank.chosen, alone.chosen, alone.scores, strict=False))
        assert len(steps) >= 2 * 20 / (1 + drafts)
        for ours, theirs, scores in steps:
            assert ours.shape == theirs.shape
            differs = (ours != theirs).any(-1)
            assert all(pool_margin(row) < TIE for row in scores[differs])
    assert len(ranks[0].logits) >= 20 / (1 + drafts)
    for ours, theirs in zip(ranks[0].logits, alone.logits, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
    for rank_stats in stats.ranks:
        for kind in ('conv', 'checkpoint'):
            assert rank_stats.state_bytes[kind] * tp == whole.ranks[0].state_bytes[kind]
        # every rank holds the whole indexer, so that all choose the same tokens
        assert rank_stats.state_bytes['index'] == whole.ranks[0].state_bytes['index']
