"""Small admissions for the tests of the policy, and words for what they decide."""

from __future__ import annotations

from typing import Any

from actors.messages import Arrival, EngineStats, Outcome, Refusal, WorkerReport, WorkerState
from actors.policy import Admission, Decision, Limits
from actors.sessions import SessionLimits, SessionTable
from replayssm.stats import ReplayStats


def arrival(request_id: str, session: str | None = None, owner: str = 'api', **options: Any) -> Arrival:
    return Arrival(request_id, owner, session or request_id, **({'timeout_s': 60.0} | options))


def report(worker_id: str = 'w', capacity: int = 2, state: WorkerState = 'ready', **options: Any) -> WorkerReport:
    return WorkerReport(worker_id, state, capacity, **options)


def engine(state_slots: int = 100, kv_blocks: int = 100) -> EngineStats:
    replay = ReplayStats(
        ranks=(),
        state_slots=state_slots,
        state_slots_used=0,
        kv_blocks=kv_blocks,
        kv_blocks_used=0,
        kv_blocks_free=kv_blocks,
        kv_blocks_gained=None,
        invalidations={},
        recomputed_tokens={},
    )
    return EngineStats(0, 0, replay)


def table() -> SessionTable:
    return SessionTable(SessionLimits(max_sessions=100, max_tokens=10_000, ttl_s=100.0, keeps_state=True))


def new_admission(max_queued: int = 8, **limits: Any) -> Admission:
    return Admission(Limits(max_queued, lease_timeout_s=10.0, worker_timeout_s=5.0, **limits), table(), 0.0)


def admission(max_queued: int = 2, capacity: int = 2, **limits: Any) -> Admission:
    made = new_admission(max_queued, **limits)
    made.report(report(capacity=capacity), 0.0)
    return made


def end(target: Admission, request_id: str, now_s: float, generated: int = 0) -> list[Decision]:
    """End a request as one that has said all it had to say."""
    outcome = Outcome(request_id, 'length', generation_tokens=generated, end='length', cached_tokens=0)
    return target.finish(outcome, now_s)


def only(decisions: list[Decision]) -> Decision:
    assert len(decisions) == 1
    return decisions[0]


def refusal(decisions: list[Decision]) -> Refusal:
    decision = only(decisions)
    assert isinstance(decision, Refusal)
    return decision


def fill(target: Admission, count: int, now_s: float = 0.0) -> None:
    for index in range(count):
        target.submit(arrival(f'fill-{index}'), now_s)
