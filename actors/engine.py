"""LMDeploy's PyTorch engine as a source of token events: token ids in, token ids out, no text.

Text is the ingress's business: the engine's event loop shares its interpreter with whatever else its process does, and
the ingress needs the token history anyway to go on elsewhere when a worker dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from actors.checkpoint import CheckpointMismatch
from actors.config import EngineConfig, ModelConfig
from actors.engine_build import build_engine
from actors.engine_weights import EngineWeights
from actors.messages import PAUSED, Action, EngineStats, GenerateRequest, Lease, TokenEvent, WorkerState
from actors.token_events import token_event

logger = logging.getLogger(__name__)

T = TypeVar('T')
Drain = Callable[[], Awaitable[None]]

_PAUSED_EVENT = TokenEvent([], finish_reason='error', error=PAUSED)


class EngineUnhealthy(RuntimeError):
    """The engine cannot serve any more; only a new process helps."""


class ChangeRefused(ValueError):
    """The engine cannot be put to sleep, woken up or reloaded as asked, and stays as it is."""


@dataclass(frozen=True, slots=True)
class _Running:
    lease: Lease
    production: Future[None]
    emit: Callable[[TokenEvent], None]


async def _at_once() -> None:
    """Wait for nobody."""


class TokenEngine:
    """One engine on a thread and an event loop of its own.

    A load of minutes or a blocked step therefore never blocks the caller's loop, which keeps answering health checks
    and can say what is wrong.

    Args:
        model: Which checkpoint.
        config: How to run it.
        stall_timeout_s: A batch that does not advance for so long counts as stuck.
        stream_period_s: Least time between two events of one request; tokens in between come together.
        build: Makes LMDeploy's engine; blocks until the model is loaded.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        stall_timeout_s: float,
        stream_period_s: float = 0.0,
        build: Callable[[ModelConfig, EngineConfig], Any] = build_engine,
    ) -> None:
        self._model = model
        self._config = config
        self._stall_timeout_s = stall_timeout_s
        self._stream_period_s = stream_period_s
        self._build = build
        self._state: WorkerState = 'loading'
        self._error = ''
        self._engine: Any = None
        self._metrics: Any = None
        self._weights: EngineWeights | None = None
        self._changing = False
        self._loop = asyncio.new_event_loop()
        self._running: dict[str, _Running] = {}
        self._session_ids = itertools.count()
        self._last_tick: tuple[int, float] = (-1, time.monotonic())
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name='TokenEngine', daemon=True)

    @property
    def state(self) -> WorkerState:
        """'loading', 'ready', 'sleeping', 'reloading' or 'failed'."""
        return self._state

    @property
    def weights_version(self) -> int:
        """See `WorkerReport.weights_version`."""
        return self._weights.version if self._weights is not None else 0

    @property
    def error(self) -> str:
        """Why the engine failed."""
        return self._error

    def start(self) -> None:
        """Begin to load the model and return at once."""
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield token events until one has a finish reason. Closing the generator aborts the request in the engine.

        The last event has the error `PAUSED` when the engine sleeps or gets other weights.

        Raises:
            EngineUnhealthy: The engine is loading or has failed.
        """
        if self._state in ('sleeping', 'reloading'):
            yield _PAUSED_EVENT
            return
        if self._state != 'ready':
            raise EngineUnhealthy(f'the engine is {self._state}. {self._error}'.rstrip())
        caller = asyncio.get_running_loop()
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()

        def emit(event: TokenEvent) -> None:
            caller.call_soon_threadsafe(events.put_nowait, event)

        production = asyncio.run_coroutine_threadsafe(self._produce(request, emit), self._loop)
        self._running[request.request_id] = _Running(request.lease, production, emit)
        try:
            while True:
                event = await events.get()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            del self._running[request.request_id]
            production.cancel()

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Leases of the requests that somebody reads."""
        return tuple(running.lease for running in self._running.values())

    def abort(self, request_id: str) -> None:
        """End a request with the finish reason 'abort'; unknown ones are ignored."""
        running = self._running.get(request_id)
        if running is not None:
            running.production.cancel()
            running.emit(TokenEvent([], finish_reason='abort'))

    async def check(self, timeout_s: float) -> None:
        """Probe a loaded engine; an engine that still loads is well.

        Raises:
            EngineUnhealthy: Its loop is blocked or dead, its batch is stuck, or a rank is gone.
        """
        if self._state == 'failed':
            raise EngineUnhealthy(self._error)
        if self._state == 'loading' or self._changing:
            return
        try:
            await self._on_engine_loop(self._probe(timeout_s / 2), timeout_s)
        except TimeoutError:
            raise EngineUnhealthy(f'the engine event loop has not answered for {timeout_s:g} s') from None

    async def stats(self) -> EngineStats | None:
        """Return a snapshot, or None while there is no engine or it does not run."""
        if self._state != 'ready':
            return None
        return await self._on_engine_loop(self._snapshot(), None)

    async def sleep(self, level: Literal[1, 2], drain: Drain = _at_once) -> None:
        """Release KV cache and states, and the weights: to the host's memory at level 1, altogether at level 2.

        Requests that still run when `drain` returns end with the error `PAUSED`. Do not cancel; the same goes for
        `wakeup` and `reload`.

        Raises:
            ChangeRefused: There is no engine that could sleep.
            EngineUnhealthy: It failed half-way.
        """
        weights = self._changeable('sleep', 'ready', 'sleeping')
        await drain()
        await self._change('sleeping', weights.sleep(level), 'sleeping')

    async def wakeup(self) -> None:
        """Serve again after a sleep.

        Raises:
            ChangeRefused: The engine does not sleep.
            EngineUnhealthy: It failed half-way.
        """
        weights = self._changeable('wakeup', 'sleeping')
        await self._change('reloading', weights.wakeup(), 'ready')

    async def reload(self, path: str | None = None, drain: Drain = _at_once) -> None:
        """Read the weights from folder `path`, None for the present one, and serve; requests end as in `sleep`.

        Raises:
            ChangeRefused: `path` holds another architecture or none, weights are random, or no engine is up.
            EngineUnhealthy: It failed half-way.
        """
        if self._model.random_weights:
            raise ChangeRefused('reload: model.random_weights is true, and there are no others to read')
        weights = self._changeable('reload', 'ready', 'sleeping')
        try:
            checkpoint = await asyncio.to_thread(weights.checkpoint, path)
        except CheckpointMismatch as error:
            raise ChangeRefused(f'reload: {error}') from None
        await drain()
        await self._change('reloading', weights.replace(checkpoint), 'ready')

    def close(self, timeout_s: float) -> None:
        """Abort what runs, release the ranks and end the thread. Blocks up to `timeout_s`."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            logger.exception('the engine failed')
            self._error = f'{type(error).__name__}: {error}'
            self._state = 'failed'

    async def _serve(self) -> None:
        engine = self._build(self._model, self._config)
        from actors.lmdeploy_metrics import LmdeployMetrics

        drafts = self._config.speculative.num_tokens if self._config.speculative else 0
        self._metrics = LmdeployMetrics(self._model.name, engine.max_session_len, drafts)
        self._weights = EngineWeights(engine)
        engine.start()
        self._engine = engine
        self._state = 'ready'
        await self._stop.wait()
        self._state = 'failed'
        self._error = 'the engine is closed'
        engine.close()
        with contextlib.suppress(asyncio.CancelledError):
            await engine.wait_tasks()

    def _changeable(self, action: Action, *states: WorkerState) -> EngineWeights:
        if self._weights is None or self._changing or self._state not in states:
            raise ChangeRefused(f'{action}: the engine is {self._state}, expected {" or ".join(states)}')
        return self._weights

    async def _change(self, during: WorkerState, work: Coroutine[Any, Any, None], after: WorkerState) -> None:
        self._state, self._changing = during, True
        for running in self._running.values():
            running.production.cancel()
            running.emit(_PAUSED_EVENT)
        try:
            await self._on_engine_loop(work, None)
            self._state = after
        except Exception as error:
            logger.exception('the engine failed')
            self._error = f'{type(error).__name__}: {error}'
            self._state = 'failed'
            raise EngineUnhealthy(self._error) from error
        finally:
            self._changing = False

    async def _on_engine_loop(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)

    async def _produce(self, request: GenerateRequest, emit: Callable[[TokenEvent], None]) -> None:
        """Run one request on the engine's loop; cancelling frees its batch slot, KV blocks and state at once."""
        session_id = next(self._session_ids)
        gen_config = replace(request.gen_config, stop_words=None)
        stop_ids = () if gen_config.ignore_eos else tuple(gen_config.stop_token_ids or ())
        instance = self._engine.create_instance()
        outputs = instance.async_stream_infer(session_id, request.input_ids, gen_config=gen_config)
        observer = self._metrics.request(len(request.input_ids))
        try:
            async for output in outputs:
                observer.observe(output)
                event = token_event(output, stop_ids, keep_stop=gen_config.include_stop_str_in_output)
                emit(event)
                if event.finish_reason is None and self._stream_period_s:
                    # LMDeploy gathers what is generated meanwhile into the next output.
                    await asyncio.sleep(self._stream_period_s)
        except Exception as error:
            logger.exception('request %s failed', request.request_id)
            emit(TokenEvent([], finish_reason='error', error=type(error).__name__))
        finally:
            await outputs.aclose()

    async def _probe(self, timeout_s: float) -> None:
        health = self._engine.get_local_health_status()
        if not health['alive']:
            raise EngineUnhealthy(health['message'])
        metrics = health['schedule_metrics']
        now_s = time.monotonic()
        if metrics.scheduler_tick != self._last_tick[0] or metrics.active_seqs + metrics.waiting_seqs == 0:
            self._last_tick = (metrics.scheduler_tick, now_s)
        elif now_s - self._last_tick[1] > self._stall_timeout_s:
            raise EngineUnhealthy(f'{metrics.active_seqs} sequences have not advanced for {self._stall_timeout_s:g} s')
        await _check_ranks(getattr(self._engine.executor, 'workers', ()), timeout_s)

    async def _snapshot(self) -> EngineStats:
        from replayssm import patch

        metrics = self._engine.get_schedule_metrics()
        replay = await patch.collect(self._engine)
        return EngineStats(metrics.active_seqs, metrics.waiting_seqs, replay, self._metrics.families(metrics))


async def _check_ranks(ranks: Any, timeout_s: float) -> None:
    """Notice ranks that died while nothing ran; a rank that is merely busy does not answer in time, and may."""
    if not ranks:
        return
    from ray.exceptions import RayActorError

    pings = [asyncio.ensure_future(rank.__ray_ready__.remote()) for rank in ranks]
    done, pending = await asyncio.wait(pings, timeout=timeout_s)
    for ping in pending:
        ping.cancel()
    for index, ping in enumerate(pings):
        if ping in done and isinstance(ping.exception(), RayActorError):
            raise EngineUnhealthy(f'rank {index} is dead: {ping.exception()}')
