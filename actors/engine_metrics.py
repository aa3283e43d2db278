"""What is exported of an engine, its ranks and their GPUs; see `actors.metrics`."""

from __future__ import annotations

from collections.abc import Callable

from actors.messages import EngineStats, Histogram
from actors.metric_spec import MetricGroup, MetricSpec, Readings, each, one
from replayssm.stats import GpuStats, InvalidationReason, RankStats


def _replayed(read: Callable[[RankStats], int]) -> Callable[[RankStats], Readings]:
    """Read a counter that nobody counts on a rank that keeps no records."""
    return one(lambda rank: read(rank) if 'ring' in rank.state_bytes else None)


def _accepted_drafts(engine: EngineStats) -> Histogram | None:
    counts = engine.replay.accepted_drafts
    if not counts:
        return None
    total = sum(accepted * count for accepted, count in enumerate(counts))
    return Histogram(tuple(range(len(counts))), (*counts, 0), total)


ENGINES: MetricGroup[EngineStats] = MetricGroup(
    'Engine',
    "the engine's scheduler",
    ('model_name', 'replica'),
    (
        MetricSpec('replayssm_sequences_running', 'gauge', 'Sequences of the running batch.', one(lambda e: e.running)),
        MetricSpec(
            'replayssm_sequences_waiting', 'gauge', 'Sequences that wait inside the engine.', one(lambda e: e.waiting)
        ),
        MetricSpec('replayssm_state_slots', 'gauge', 'State slots of the pool.', one(lambda e: e.replay.state_slots)),
        MetricSpec(
            'replayssm_state_slots_used',
            'gauge',
            'State slots held by sequences or prefix checkpoints.',
            one(lambda e: e.replay.state_slots_used),
        ),
        MetricSpec('replayssm_kv_blocks', 'gauge', 'Blocks of the paged KV cache.', one(lambda e: e.replay.kv_blocks)),
        MetricSpec(
            'replayssm_kv_blocks_used',
            'gauge',
            'KV-cache blocks held by sequences; those that only the prefix cache holds are free.',
            one(lambda e: e.replay.kv_blocks_used),
        ),
        MetricSpec(
            'replayssm_kv_blocks_gained',
            'gauge',
            'KV-cache blocks that the state memory saved amounts to on the rank that gains least: saved bytes * '
            '`engine.cache_max_entry_count` / block bytes. Part of `replayssm_kv_blocks` where their number is '
            'automatic. Negative when ReplaySSM takes more than stock.',
            one(lambda e: e.replay.kv_blocks_gained),
        ),
        MetricSpec(
            'replayssm_accepted_drafts',
            'histogram',
            'Drafts accepted per verified window, with a bucket for every number; absent without speculative decoding.',
            one(_accepted_drafts),
        ),
        MetricSpec(
            'replayssm_state_invalidations_total',
            'counter',
            'Sequences whose KV and state were dropped while their token history was kept.',
            each(lambda e: e.replay.invalidations, InvalidationReason),
            ('reason',),
        ),
        MetricSpec(
            'replayssm_recomputed_tokens_total',
            'counter',
            'Tokens of history computed again because of an invalidation.',
            each(lambda e: e.replay.recomputed_tokens, InvalidationReason),
            ('reason',),
        ),
    ),
)

RANKS: MetricGroup[RankStats] = MetricGroup(
    'State memory',
    'every tensor-parallel rank. Ranks take the same steps: aggregate bytes with `sum`, counts with `max`',
    ('model_name', 'replica', 'rank'),
    (
        MetricSpec(
            'replayssm_state_bytes',
            'gauge',
            'Bytes allocated for state slots.',
            each(lambda r: r.state_bytes),
            ('kind',),
        ),
        MetricSpec(
            'replayssm_state_stock_bytes',
            'gauge',
            'Bytes that LMDeploy without ReplaySSM would allocate for the same slots, drafts and checkpoint dtype.',
            one(lambda r: r.stock_bytes),
        ),
        MetricSpec(
            'replayssm_kv_block_bytes',
            'gauge',
            'Bytes of one block of the paged KV cache, draft layers included.',
            one(lambda r: r.kv_block_bytes or None),
        ),
        MetricSpec(
            'replayssm_decode_steps_total',
            'counter',
            'Decode and verify forwards.',
            _replayed(lambda r: r.decode_steps),
        ),
        MetricSpec(
            'replayssm_windows_total',
            'counter',
            'Windows decoded or verified, one per sequence and forward.',
            _replayed(lambda r: r.windows),
        ),
        MetricSpec(
            'replayssm_flushes_total',
            'counter',
            'Checkpoints rewritten, once per sequence and step whatever the number of layers.',
            _replayed(lambda r: r.flushes),
        ),
        MetricSpec('replayssm_records_total', 'counter', 'Records appended to rings.', _replayed(lambda r: r.records)),
        MetricSpec(
            'replayssm_replayed_records_total',
            'counter',
            'Committed records read back, by every window those behind its checkpoint. Per window this is the age of '
            'a checkpoint in tokens.',
            _replayed(lambda r: r.replayed_records),
        ),
        MetricSpec(
            'replayssm_rejected_records_total',
            'counter',
            'Records rolled back because their drafts were rejected.',
            _replayed(lambda r: r.rejected_records),
        ),
        MetricSpec(
            'replayssm_state_traffic_bytes_total',
            'counter',
            'Bytes of recurrent state that decode and verify forwards read and wrote: (windows + flushes) * checkpoint '
            'bytes + (records + replayed records) * record bytes. By the layout: what a kernel reads twice, '
            'convolution states and positions are left out.',
            _replayed(lambda r: r.traffic_bytes),
        ),
        MetricSpec(
            'replayssm_state_stock_traffic_bytes_total',
            'counter',
            'Bytes that LMDeploy without ReplaySSM would have read and written for the same windows: (windows + '
            'records) * checkpoint bytes, as it reads a state per window and writes one per token of it.',
            _replayed(lambda r: r.stock_traffic_bytes),
        ),
    ),
)

GPUS: MetricGroup[GpuStats] = MetricGroup(
    'GPUs',
    'NVML, read by every rank on its own node; absent without a GPU and while a model loads',
    ('model_name', 'replica', 'rank', 'node', 'gpu'),
    (
        MetricSpec(
            'replayssm_gpu_memory_used_bytes',
            'gauge',
            'Device memory in use by all processes.',
            one(lambda g: g.memory_used_bytes),
        ),
        MetricSpec(
            'replayssm_gpu_memory_peak_bytes',
            'gauge',
            "The most that was in use at any of the worker's reports since the rank started.",
            one(lambda g: g.memory_peak_bytes),
        ),
        MetricSpec('replayssm_gpu_memory_total_bytes', 'gauge', 'Device memory.', one(lambda g: g.memory_total_bytes)),
        MetricSpec(
            'replayssm_gpu_utilization_ratio',
            'gauge',
            'Share of time with a kernel running, 0 to 1.',
            one(lambda g: g.utilization_ratio),
        ),
    ),
)
