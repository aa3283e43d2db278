"""A worker: the Serve replica that owns one tensor-parallel group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Literal

from ray import serve

from actors.autoscaling import DEMAND
from actors.config import AppConfig
from actors.engine import ChangeRefused, EngineUnhealthy, TokenEngine
from actors.messages import (
    Change,
    Changed,
    EngineStats,
    GenerateRequest,
    ReportReply,
    TokenEvent,
    WorkerReport,
    WorkerState,
)
from actors.replica import by_value, is_stopping

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

_LOADING_POLL_S = 0.1
_PROBE_SHARE = 0.5
"""Part of the health check's time that the engine gets to answer, so that the reason is ours and not a time-out."""
_DRAIN_PERIOD_S = 0.1


class Worker:
    """Serve deployment. The model loads in the background, however long that takes.

    The replica is up at once, so that everybody can be told what it is doing. With `worker.wait_for_model` it is up
    when the model is, and Serve tries again if that does not load.

    Raises:
        EngineUnhealthy: With `worker.wait_for_model`: why the model did not load.
    """

    async def __init__(self, config: AppConfig, router: DeploymentHandle) -> None:  # type: ignore[misc]
        self._id = serve.get_replica_context().replica_id.unique_id
        self._capacity = config.worker_capacity
        self._options = config.worker
        self._router = by_value(router)
        self._lease_timeout_s = config.router.lease_timeout_s
        self._orphans: dict[str, float] = {}
        self._pausing: WorkerState | None = None
        self._change: asyncio.Task[Changed] | None = None
        self._failure = ''
        self._demand: float | None = None
        self._stats: EngineStats | None = None
        self._readings = 0
        self._engine = TokenEngine(
            config.model,
            config.engine,
            stall_timeout_s=config.worker.stall_timeout_s,
            stream_period_s=config.worker.stream_period_s,
        )
        self._engine.start()
        self._reporter = asyncio.get_running_loop().create_task(self._report_forever())
        if config.worker.wait_for_model:
            await self._wait_for_model()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Stream one request's token events. Cancelling the call aborts the request in the engine."""
        async with contextlib.aclosing(self._engine.generate(request)) as events:
            async for event in events:
                yield event

    async def change(self, change: Change) -> Changed:
        """Put the engine to sleep, wake it up or reload it. A caller that leaves does not stop it half-way."""
        if self._change is not None and not self._change.done():
            return self._changed('refused', message='another change is under way')
        self._change = asyncio.get_running_loop().create_task(self._carry_out(change))
        return await asyncio.shield(self._change)

    async def check_health(self) -> None:
        """Fail, so that Serve replaces this replica, when the engine cannot serve any more. Loading is healthy."""
        try:
            await self._engine.check(self._options.health_check_timeout_s * _PROBE_SHARE)
        except EngineUnhealthy as error:
            # Serve wants to see it a few times before it acts; until then the router sends nobody here.
            self._failure = str(error)
            raise
        self._failure = ''

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve's autoscaler of the demand, once the router has."""
        return {} if self._demand is None else {DEMAND: self._demand}

    async def __del__(self) -> None:
        """Serve calls this after running requests have ended or `drain_timeout_s` has passed."""
        await self._report()
        self._reporter.cancel()
        await asyncio.to_thread(self._engine.close, self._options.drain_timeout_s)

    @property
    def _state(self) -> WorkerState:
        if self._failure:
            return 'failed'
        return 'draining' if is_stopping() else self._pausing or self._engine.state

    async def _carry_out(self, change: Change) -> Changed:
        ended = 0

        async def drain() -> None:
            nonlocal ended
            self._pausing = 'sleeping' if change.action == 'sleep' else 'reloading'
            try:
                ended = await self._drain(change.timeout_s)
            finally:
                self._pausing = None

        try:
            if change.action == 'sleep':
                await self._engine.sleep(change.level, drain)
            elif change.action == 'wakeup':
                await self._engine.wakeup()
            else:
                await self._engine.reload(change.path, drain)
        except ChangeRefused as error:
            return self._changed('refused', message=str(error))
        except EngineUnhealthy as error:
            return self._changed('failed', ended, str(error))
        finally:
            await self._report()
        return self._changed('done', ended)

    def _changed(self, outcome: Literal['done', 'refused', 'failed'], ended: int = 0, message: str = '') -> Changed:
        return Changed(self._id, outcome, self._state, self._engine.weights_version, ended, message)

    async def _drain(self, timeout_s: float) -> int:
        """Wait for the requests that are on their way here or running; return how many are left after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while True:
            left = await self._report() | self._running()
            if not left or time.monotonic() > end_s:
                return len(left)
            await asyncio.sleep(_DRAIN_PERIOD_S)

    async def _wait_for_model(self) -> None:
        while self._engine.state == 'loading':
            await asyncio.sleep(_LOADING_POLL_S)
        # Before Serve says that the replica has started, so that no request comes too early.
        await self._report()
        if self._engine.state == 'failed':
            raise EngineUnhealthy(self._engine.error)

    async def _report_forever(self) -> None:
        period_s = self._options.report_period_s
        reading: asyncio.Task[EngineStats | None] | None = None
        while True:
            # An engine that is slow to answer holds up its numbers, not the sign of life.
            reading = reading or asyncio.get_running_loop().create_task(self._engine.stats())
            done, _ = await asyncio.wait({reading}, timeout=period_s)
            if done:
                if (error := reading.exception()) is None:
                    self._stats = reading.result()
                    self._readings += 1
                else:
                    logger.warning('no statistics from the engine: %r', error)
                reading = None
            await self._report()
            await asyncio.sleep(period_s)

    async def _report(self) -> frozenset[str]:
        """Tell the router of this worker; return the requests that hold a lease here, none if it cannot be reached."""
        message = self._failure or self._engine.error
        report = WorkerReport(
            self._id,
            self._state,
            self._capacity,
            message,
            self._stats,
            self._readings,
            self._engine.leases,
            self._engine.weights_version,
        )
        try:
            reply: ReportReply = await self._router.report.remote(report)
        except Exception as error:
            # The router restarts on its own; the next report finds it.
            logger.warning('could not report to the router: %r', error)
            return frozenset()
        self._demand = reply.demand
        self._abort_orphans(reply.leased)
        return reply.leased

    def _running(self) -> set[str]:
        return {lease.request_id for lease in self._engine.leases}

    def _abort_orphans(self, leased: frozenset[str]) -> None:
        """End requests that have had no lease for so long that their ingress must be dead.

        Ray does not end a stream whose reader has died. A router that has just restarted does not know all leases.
        """
        now_s = time.monotonic()
        self._orphans = {
            request_id: self._orphans.get(request_id, now_s)
            for request_id in self._running()
            if request_id not in leased
        }
        for request_id, since_s in self._orphans.items():
            if now_s - since_s > self._lease_timeout_s:
                logger.warning('request %s has lost its ingress', request_id)
                self._engine.abort(request_id)
