"""Statistics of a small deployment, for the tests of metrics and exporter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from prometheus_client.core import Metric

from actors.messages import EngineStats, RouterStats, WorkerReport
from actors.stats import E2E_BOUNDS_S, TPOT_BOUNDS_S, TTFT_BOUNDS_S, HistogramCounter
from replayssm.stats import GpuStats, RankStats, ReplayStats

GPU = GpuStats('n', 5, memory_used_bytes=3, memory_peak_bytes=4, memory_total_bytes=10, utilization_ratio=0.5)


def rank(index: int = 0, gpu: GpuStats | None = GPU) -> RankStats:
    return RankStats(
        rank=index,
        state_bytes={'conv': 1024, 'checkpoint': 4096, 'ring': 512, 'cursor': 256},
        stock_bytes=17408,
        kv_block_bytes=64,
        decode_steps=100,
        windows=110,
        flushes=7,
        records=130,
        replayed_records=800,
        rejected_records=30,
        gpu=gpu,
    ).with_traffic(checkpoint_bytes=512, record_bytes=16)


def stock_rank() -> RankStats:
    """A rank without ReplaySSM."""
    return RankStats(0, {'conv': 1024, 'checkpoint': 16384}, 17408)


def engine(*ranks: RankStats, lmdeploy: Iterable[Metric] = ()) -> EngineStats:
    replay = ReplayStats(
        ranks=ranks or (rank(),),
        state_slots=10,
        state_slots_used=3,
        kv_blocks=512,
        kv_blocks_used=44,
        kv_blocks_free=400,
        kv_blocks_gained=144,
        invalidations={'preemption': 2},
        recomputed_tokens={'preemption': 90},
        accepted_drafts=(5, 7, 6, 4),
    )
    return EngineStats(running=2, waiting=1, replay=replay, lmdeploy=tuple(lmdeploy))


def worker(worker_id: str = 'a', stats: EngineStats | None = None) -> WorkerReport:
    return WorkerReport(worker_id, 'ready', capacity=8, engine=stats or engine())


def router(*workers: WorkerReport) -> RouterStats:
    ttft_s = HistogramCounter(TTFT_BOUNDS_S)
    for value_s in (0.001, 0.03, 3000.0):
        ttft_s.observe(value_s)
    return RouterStats(
        model_name='demo',
        running=2,
        queued=1,
        admitted_total=5,
        rejected_total={'queue_full': 4},
        finished_total={'stop': 2, 'abort': 1},
        prompt_tokens_total=60,
        generation_tokens_total=40,
        ttft_s=ttft_s.snapshot(),
        tpot_s=HistogramCounter(TPOT_BOUNDS_S).snapshot(),
        e2e_s=HistogramCounter(E2E_BOUNDS_S).snapshot(),
        workers=workers or (worker(),),
    )


def loading(report: WorkerReport) -> WorkerReport:
    return replace(report, state='loading', engine=None)
