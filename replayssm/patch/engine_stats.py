"""Statistics of a running engine, gathered from its scheduler and from every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmdeploy.pytorch.engine.engine_loop import EngineLoop
from lmdeploy.pytorch.engine.executor.base_worker import WorkerWrapperBase

from replayssm.gpu import open_gpu
from replayssm.layout import kind_bytes, kv_blocks_gained, slot_bytes
from replayssm.patch.schema import COUNTER_FIELDS, COUNTERS
from replayssm.patching import Patches
from replayssm.stats import GpuStats, RankStats, ReplayStats, counters_of

_GPU = '_replayssm_gpu'


def install(patches: Patches) -> None:
    """Count accepted drafts, and give the workers of multi-process executors the method that `collect` calls."""
    patches.add(WorkerWrapperBase, 'replay_rank_stats', lambda self: rank_stats(self.model_agent))

    @patches.wrap(EngineLoop, '_make_infer_outputs')
    def make_infer_outputs(make: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = make(self, *args, **kwargs)
        accepted = counters_of(self.scheduler).accepted_drafts
        for output in outputs.values():
            # Here every forward is seen; a slow reader of a stream finds several in one output.
            if output.req_metrics.spec_info:
                accepted[output.req_metrics.spec_info['num_accepted_tokens']] += 1
        return outputs


async def collect(engine: Any) -> ReplayStats:
    """See `replayssm.patch.collect`."""
    executor, scheduler = engine.executor, engine.scheduler
    if hasattr(executor, 'model_agent'):
        ranks = [rank_stats(executor.model_agent)]
    else:
        ranks = await executor.collective_rpc_async('replay_rank_stats')
    states, blocks, counters = scheduler.state_manager, scheduler.block_manager, counters_of(scheduler)
    drafts = executor.specdecode_config.num_speculative_tokens if executor.specdecode_config else None
    return ReplayStats(
        ranks=tuple(ranks),
        state_slots=states.allocator.num_states,
        state_slots_used=states.allocator.num_states - states.get_num_free(),
        kv_blocks=blocks.num_gpu_blocks,
        kv_blocks_used=round(scheduler._get_request_cache_usage(blocks.num_gpu_blocks) * blocks.num_gpu_blocks),
        kv_blocks_free=blocks.get_num_free_gpu_blocks(),
        kv_blocks_gained=_blocks_gained(ranks, executor.cache_config.cache_max_entry_count),
        invalidations=dict(counters.invalidations),
        recomputed_tokens=dict(counters.recomputed_tokens),
        checkpoint_slots=states.get_num_allocated_checkpoint_states(),
        accepted_drafts=() if drafts is None else tuple(counters.accepted_drafts[n] for n in range(drafts + 1)),
    )


def rank_stats(agent: Any) -> RankStats:
    """Statistics of the rank whose `BaseModelAgent` this is; a sleeping engine holds no state."""
    layout = getattr(agent.model_config, 'state_layout', None)
    pool = agent.state_cache_engine
    if layout is None or pool is None:
        return RankStats(agent.rank, {}, 0)
    slots = agent.cache_config.num_state_caches
    tensors = layout.tensors() if agent.model_config.replay else layout.stock_tensors()
    sizes = {kind: size * slots for kind, size in kind_bytes(tensors).items()}
    assert sum(sizes.values()) == pool.allocation.nbytes, 'the layout must describe what is really allocated'
    counters = pool.named_state_caches.get(COUNTERS)
    counts = {} if counters is None else dict(zip(COUNTER_FIELDS, counters.tolist(), strict=True))
    stats = RankStats(
        rank=agent.rank,
        state_bytes=sizes,
        stock_bytes=slot_bytes(layout.stock_tensors()) * slots,
        kv_block_bytes=_kv_block_bytes(agent),
        gpu=_gpu_stats(agent, pool.state_caches[0].device),
        **counts,
    )
    return stats.with_traffic(layout.checkpoint_bytes, layout.record_bytes)


def _blocks_gained(ranks: Sequence[RankStats], cache_share: float) -> int | None:
    """All ranks have the same number of blocks, so the one that gains least decides."""
    if not all(rank.kv_block_bytes for rank in ranks):
        return None
    return min(
        kv_blocks_gained(rank.stock_bytes - sum(rank.state_bytes.values()), cache_share, rank.kv_block_bytes)
        for rank in ranks
    )


def _kv_block_bytes(agent: Any) -> int:
    engines = (agent.cache_engine, getattr(agent.spec_agent, 'cache_engine', None))
    return sum(engine.block_cache_plan.logical_block_nbytes for engine in engines if engine is not None)


def _gpu_stats(agent: Any, device: Any) -> GpuStats | None:
    if not hasattr(agent, _GPU):
        setattr(agent, _GPU, open_gpu(device))
    reader = getattr(agent, _GPU)
    return None if reader is None else reader.read()
