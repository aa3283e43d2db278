"""What the status page shows, as JSON: the router's numbers without those that only Prometheus needs."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from pydantic import BaseModel, ConfigDict, Field

from actors.messages import Histogram, RouterStats, WorkerReport, WorkerState
from replayssm.layout import Kind
from replayssm.stats import RankStats

_GENERATED = 'lmdeploy_generation_tokens'


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class HistogramState(_Part):
    """A histogram in seconds: `counts[i]` samples in `(bounds[i-1], bounds[i]]`, the last ones above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]


class RequestsState(_Part):
    """Requests of all replicas together."""

    running: int
    queued: int
    queued_tokens: int
    admitted_total: int
    rejected_total: dict[str, int]
    finished_total: dict[str, int]
    resumed_total: dict[str, int]
    ttft: HistogramState
    tpot: HistogramState


class InvalidationState(_Part):
    """State of sessions that was given up."""

    time_s: float = Field(description='Unix time.')
    reason: str
    count: int


class SessionsState(_Part):
    """Named sessions."""

    by_state: dict[str, int]
    invalidations_total: dict[str, int]
    recomputed_tokens_total: dict[str, int]
    reused_tokens_total: int
    recent: tuple[InvalidationState, ...] = Field(description='Newest first.')


class RankState(_Part):
    """State memory of one tensor-parallel rank."""

    rank: int
    state_bytes: dict[Kind, int] = Field(description='By kind.')
    stock_bytes: int = Field(description='What LMDeploy without ReplaySSM would allocate for the same slots.')


class ReplicaState(_Part):
    """One replica of the engine; numbers of its engine are null until it has reported some."""

    id: str
    state: WorkerState
    message: str
    capacity: int
    running: int | None = None
    waiting: int | None = None
    state_slots: int | None = None
    state_slots_used: int | None = None
    kv_blocks: int | None = None
    kv_blocks_used: int | None = None
    generation_tokens_total: int | None = None
    ranks: tuple[RankState, ...] = ()


class UiState(_Part):
    """Everything that the status page shows at one moment."""

    time_s: float = Field(description='Unix time.')
    model: str
    requests: RequestsState
    sessions: SessionsState
    replicas: tuple[ReplicaState, ...]


def ui_state(stats: RouterStats, time_s: float) -> UiState:
    """Return what the page shows of the router's numbers.

    Args:
        stats: The router's.
        time_s: Unix time at which they were read.
    """
    sessions = stats.sessions
    recent = [InvalidationState(time_s=one.time_s, reason=one.reason, count=one.count) for one in sessions.recent]
    return UiState(
        time_s=time_s,
        model=stats.model_name,
        requests=RequestsState(
            running=stats.running,
            queued=stats.queued,
            queued_tokens=stats.queued_tokens,
            admitted_total=stats.admitted_total,
            rejected_total=stats.rejected_total,
            finished_total=stats.finished_total,
            resumed_total=stats.resumed_total,
            ttft=_histogram(stats.ttft_s),
            tpot=_histogram(stats.tpot_s),
        ),
        sessions=SessionsState(
            by_state=sessions.by_state,
            invalidations_total=sessions.invalidations_total,
            recomputed_tokens_total=sessions.recomputed_tokens_total,
            reused_tokens_total=sessions.reused_tokens_total,
            recent=tuple(reversed(recent)),
        ),
        replicas=tuple(_replica(report) for report in sorted(stats.workers, key=lambda report: report.worker_id)),
    )


def _histogram(histogram: Histogram) -> HistogramState:
    return HistogramState(bounds=histogram.bounds, counts=histogram.counts)


def _replica(report: WorkerReport) -> ReplicaState:
    replica = ReplicaState(id=report.worker_id, state=report.state, message=report.message, capacity=report.capacity)
    engine = report.engine
    if engine is None:
        return replica
    return replica.model_copy(
        update={
            'running': engine.running,
            'waiting': engine.waiting,
            'state_slots': engine.replay.state_slots,
            'state_slots_used': engine.replay.state_slots_used,
            'kv_blocks': engine.replay.kv_blocks,
            'kv_blocks_used': engine.replay.kv_blocks_used,
            'generation_tokens_total': _generated(engine.lmdeploy),
            'ranks': tuple(_rank(rank) for rank in engine.replay.ranks),
        }
    )


def _rank(rank: RankStats) -> RankState:
    return RankState(
        rank=rank.rank,
        state_bytes=dict(rank.state_bytes),
        stock_bytes=rank.stock_bytes,
    )


def _generated(families: Iterable[Metric]) -> int | None:
    """Return the tokens that an engine has generated; the router only learns of them when a request has ended."""
    samples = [sample for family in families if family.name == _GENERATED for sample in family.samples]
    totals = [sample.value for sample in samples if sample.name.endswith('_total')]
    return int(sum(totals)) if totals else None
