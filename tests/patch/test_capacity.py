"""What the engine sizes from its memory budget: rings are charged, and what the checkpoint saves becomes KV blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import replayssm.cpu
from replayssm import patch
from replayssm.config import ReplayConfig
from replayssm.cpu import CpuSettings
from replayssm.layout import slot_bytes
from replayssm.patch import Settings

from .engine import EngineOptions, generate, random_prompt, running

BUDGET_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def small_memory() -> Iterator[None]:
    replayssm.cpu.enable(CpuSettings(threads_per_rank=1, memory_bytes=BUDGET_BYTES))
    yield
    patch.disable()
    replayssm.cpu.disable()


@pytest.mark.parametrize('drafts', [0, 3], ids=['plain', 'mtp3'])
async def test_automatic_kv_blocks_follow_the_state_memory(drafts: int) -> None:
    blocks, gained, state_bytes = {}, {}, {}
    for settings in (Settings(None), Settings(ReplayConfig(16))):
        patch.enable(settings)
        async with running(EngineOptions(num_drafts=drafts, num_blocks=0, max_batch_size=48)) as engine:
            await generate(engine, [random_prompt(9)], 4)
            agent, on = engine.executor.model_agent, settings.replay is not None
            blocks[on] = engine.cache_config.num_gpu_blocks
            state_bytes[on] = agent.state_cache_engine.allocation.nbytes
            stats = await patch.collect(engine)
            gained[on] = stats.kv_blocks_gained
            block_bytes = sum(agent._cache_plan_block_nbytes)
            assert stats.ranks[0].kv_block_bytes == block_bytes
            layout = agent.model_config.state_layout
            tensors = layout.tensors() if on else layout.stock_tensors()
            assert state_bytes[on] == slot_bytes(tensors) * engine.cache_config.num_state_caches
        assert state_bytes[on] + blocks[on] * block_bytes < BUDGET_BYTES
    saved_bytes = state_bytes[False] - state_bytes[True]
    assert (saved_bytes > 0) == bool(drafts)
    # LMDeploy gives this share of what is left to the KV cache.
    share = engine.cache_config.cache_max_entry_count
    assert blocks[True] - blocks[False] == pytest.approx(share * saved_bytes / block_bytes, abs=1.5)
    assert gained[False] == 0
    assert gained[True] == pytest.approx(blocks[True] - blocks[False], abs=1)
