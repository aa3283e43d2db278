"""The router: one actor that admits requests, hands out leases on workers and counts; I/O around `policy`.

It is a Serve deployment with one replica rather than a deployment-scoped actor: those belong to one version of one
deployment, so during a rolling update there would be two, each handing out the whole capacity, and handles to them go
stale when they restart. Tokens do not pass through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from actors.config import AppConfig
from actors.exporter import start_exporter
from actors.messages import Arrival, Lease, Outcome, Refusal, ReportReply, RouterStats, SessionStats, WorkerReport
from actors.policy import Admission, Decision, Limits
from actors.sessions import SessionLimits, SessionTable
from actors.stats import RequestCounters

_TICK_S = 0.05


class Router:
    """Serve deployment; every method is called through a handle."""

    def __init__(self, config: AppConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._model_name = config.model.name
        self._clock = clock
        self._sessions = SessionTable(session_limits(config))
        self._admission = Admission(admission_limits(config), self._sessions, clock())
        self._counters = RequestCounters()
        self._waiting: dict[str, asyncio.Future[Decision]] = {}
        self._ticker = asyncio.get_running_loop().create_task(self._tick())
        metrics = config.metrics
        self._exporter = start_exporter(self.stats, metrics.port, metrics.host) if metrics.port is not None else None

    async def admit(self, arrival: Arrival) -> Decision:
        """Wait for a lease on a worker, or return why there is none. Cancelling the call withdraws the request."""
        decision: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[arrival.request_id] = decision
        self._deliver(self._admission.submit(arrival, self._clock()))
        try:
            result = await decision
            if isinstance(result, Lease):
                self._counters.admit(arrival)
            return result
        except asyncio.CancelledError:
            self._deliver(self._admission.cancel(arrival.request_id, self._clock()))
            raise
        finally:
            self._waiting.pop(arrival.request_id, None)

    async def finish(self, outcome: Outcome) -> None:
        """End a request, running or waiting, and count it."""
        self._counters.finish(outcome)
        if outcome.cached_tokens is not None:
            self._sessions.count_prefix(outcome.cached_tokens)
        self._deliver(self._admission.finish(outcome, self._clock()))

    async def history(self, session: str) -> bytes:
        """Return the retained tokens of a named session, packed; empty for one that is not known."""
        return self._sessions.history(session)

    async def remember(self, session: str, epoch: int, history: bytes) -> None:
        """Keep the tokens that the client of a named session has."""
        self._sessions.remember(session, epoch, history, self._clock())

    async def renew(self, owner: str, held: Sequence[Lease]) -> None:
        """Keep an ingress's leases alive."""
        self._deliver(self._admission.renew(owner, held, self._clock()))

    async def report(self, report: WorkerReport) -> ReportReply:
        """Take note of a worker's state; return what it needs to know."""
        self._deliver(self._admission.report(report, self._clock()))
        demand = (self._admission.running + self._admission.queued) / report.capacity
        return ReportReply(self._admission.leased(report.worker_id), demand)

    async def lose(self, worker_id: str, request_id: str) -> None:
        """Take back a lease that led nowhere, and give its worker no more requests."""
        self._deliver(self._admission.lose(worker_id, request_id, self._clock()))

    async def release(self, request_id: str) -> None:
        """Take back a lease of a worker that tells of its state itself."""
        self._deliver(self._admission.cancel(request_id, self._clock()))

    async def suspect(self, worker_id: str, request_id: str) -> None:
        """Take back a lease that its worker failed, and leave the worker alone until it has reported again."""
        self._deliver(self._admission.suspect(worker_id, request_id, self._clock()))

    async def workers(self) -> tuple[WorkerReport, ...]:
        """Return the last report of every worker."""
        return self._admission.reports

    async def stats(self) -> RouterStats:
        """Return all numbers of this moment."""
        counters = self._counters
        return RouterStats(
            model_name=self._model_name,
            running=self._admission.running,
            queued=self._admission.queued,
            queued_tokens=self._admission.queued_tokens,
            admitted_total=counters.admitted,
            rejected_total=dict(counters.rejected),
            finished_total=dict(counters.finished),
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            ttft_s=counters.ttft_s.snapshot(),
            tpot_s=counters.tpot_s.snapshot(),
            e2e_s=counters.e2e_s.snapshot(),
            resumed_total=dict(counters.resumed),
            sessions=_in_unix_time(self._sessions.stats(), time.time() - self._clock()),
            workers=self._admission.reports,
        )

    async def check_health(self) -> None:
        """Fail when deadlines and leases are no longer looked after."""
        if self._ticker.done():
            raise RuntimeError(f'the router stopped ticking: {self._ticker.exception()!r}')

    async def __del__(self) -> None:
        self._ticker.cancel()
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticker

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._deliver(self._admission.expire(self._clock()))

    def _deliver(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Refusal):
                self._counters.rejected[decision.reason] += 1
            waiting = self._waiting.get(decision.request_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(decision)


def _in_unix_time(sessions: SessionStats, offset_s: float) -> SessionStats:
    """Return the statistics with the times of the router's clock moved by its distance from the time of day."""
    return replace(sessions, recent=tuple(replace(one, time_s=one.time_s + offset_s) for one in sessions.recent))


def admission_limits(config: AppConfig) -> Limits:
    """Return the bounds of admission."""
    router = config.router
    return Limits(
        router.max_queued,
        router.lease_timeout_s,
        router.worker_timeout_s,
        router.max_queued_tokens,
        router.max_kv_share,
        config.engine.block_size,
        router.home_queue,
        router.home_wait_s,
        router.resume_wait_s,
    )


def session_limits(config: AppConfig) -> SessionLimits:
    """Return the bounds of the session table."""
    router = config.router
    keeps_state = config.engine.enable_prefix_caching
    return SessionLimits(router.max_sessions, router.max_session_tokens, router.session_ttl_s, keeps_state)
