"""The token events of one request, from whichever workers run it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING

from lmdeploy.serve.core.exceptions import RequestError

from actors.errors import ServiceError, engine_error, is_engine_failure, refused
from actors.generation import Generation
from actors.messages import (
    PAUSED,
    Arrival,
    EndReason,
    FinishReason,
    GenerateRequest,
    Lease,
    Outcome,
    Refusal,
    TokenEvent,
    WorkerLost,
)

if TYPE_CHECKING:
    from actors.dispatch import Dispatcher

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_ROUTER_GRACE_S = 5.0
"""How much later than the router the ingress gives up on a request that waits."""
_DEATHS = ('worker_died', 'engine_failed')
_MAX_FRUITLESS = 2
"""A request that ends engines must not go round them all; one that is merely near waits for at most so many."""


class TokenStream:
    """Runs one request to its end, on another worker if the first one dies.

    A task of its own takes events from the worker as they come, whether or not somebody reads them, so a slow client
    holds up nobody and the lease ends with the generation.
    """

    def __init__(self, dispatcher: Dispatcher, arrival: Arrival, generation: Generation) -> None:
        self._dispatcher = dispatcher
        self._arrival = arrival
        self._generation = generation
        self._events: asyncio.Queue[TokenEvent | RequestError] = asyncio.Queue()
        self._first: TokenEvent | RequestError | None = None
        self._finish_reason: FinishReason = 'abort'
        self._end: EndReason = 'disconnect'
        self._finished = False
        self._admitted = False
        self._epoch = 0
        self._cached_tokens: int | None = None
        self._timer = _Timer(dispatcher.clock)
        # In a context of its own: Serve takes the calls of one HTTP request for one, so that of several at a time
        # some never get a replica, and cancels the report of the outcome together with the request.
        self._task = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())

    async def opened(self) -> None:
        """Wait for the first event.

        Raises:
            RequestError: The request was refused or failed before its first token.
        """
        try:
            self._first = await self._events.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(self._first, RequestError):
            raise self._first

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Yield all events.

        Raises:
            RequestError: The request failed midway.
        """
        item = self._first or await self._events.get()
        while True:
            if isinstance(item, RequestError):
                raise item
            yield item
            if item.finish_reason is not None:
                return
            item = await self._events.get()

    def close(self, finish_reason: FinishReason = 'abort') -> None:
        """Abort the request wherever it is; without effect once it has ended.

        Args:
            finish_reason: How to count it: 'stop' when the reader found a stop string.
        """
        if not (self._finished or self._task.done()):
            self._finish_reason = finish_reason
            self._end = 'stop_string' if finish_reason == 'stop' else 'disconnect'
            self._task.cancel()

    async def keep(self, output_tokens: int) -> None:
        """Remember, for a named session, that the client has the prompt and so many output tokens."""
        if self._arrival.named and self._epoch:
            history = self._generation.kept(output_tokens)
            await self._dispatcher.remember(self._arrival.session, self._epoch, history)

    def keep_soon(self, output_tokens: int) -> None:
        """Do what `keep` does when nobody can wait for it any more."""
        self._dispatcher.spawn(self.keep(output_tokens))

    async def _run(self) -> None:
        refusal: Refusal | None = None
        timeout_s = self._arrival.timeout_s
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        try:
            # The router knows better than a timer here what a waiting request waits for.
            async with asyncio.timeout_at(deadline_s + _ROUTER_GRACE_S) as deadline:
                refusal = await self._run_somewhere(deadline, deadline_s)
        except TimeoutError:
            message = f'The request did not finish within its deadline of {timeout_s:g} s.'
            self._fail(ServiceError(HTTPStatus.GATEWAY_TIMEOUT, message), 'timeout')
        except Exception as error:
            logger.exception('request %s failed', self._arrival.request_id)
            self._fail(_unavailable(f'The worker failed ({type(error).__name__})'))
        finally:
            # What was never admitted the router counted when it refused it.
            if refusal is None or self._admitted:
                self._dispatcher.finish(self._outcome())

    async def _run_somewhere(self, deadline: asyncio.Timeout, deadline_s: float) -> Refusal | None:
        """Run the request on the workers that the router says; return its refusal if it says none."""
        arrival, resumes, fruitless, delivered = self._arrival, 0, 0, 0
        while True:
            decision = await self._dispatcher.admit(arrival)
            if isinstance(decision, Refusal):
                self._fail(refused(decision))
                return decision
            deadline.reschedule(deadline_s)
            self._admitted = True
            self._epoch = decision.epoch or self._epoch
            try:
                await self._relay(decision)
                return None
            except WorkerLost as lost:
                # One that has not reached its worker, which may have begun to drain, has lost nothing.
                resumes += lost.reason != 'worker_gone'
                fruitless += lost.reason in _DEATHS
                if self._generation.delivered > delivered:
                    delivered, fruitless = self._generation.delivered, 0
                logger.warning('request %s: %s after %d tokens', arrival.request_id, lost, delivered)
                if not self._goes_on(resumes, fruitless, lost):
                    return None
                arrival = self._resumed(lost)

    def _goes_on(self, resumes: int, fruitless: int, lost: WorkerLost) -> bool:
        """Tell whether another worker is to go on; if not, end the stream.

        Args:
            resumes: Losses so far.
            fruitless: Workers that died of late, one after the other, before they had a token for this request.
        """
        obstacle = self._generation.obstacle()
        if self._generation.remaining <= 0:
            self._emit(TokenEvent([], finish_reason='length'))
        elif obstacle is not None:
            self._fail(_unavailable(f'The worker failed, and an answer with {obstacle} cannot go on elsewhere'))
        elif resumes > self._dispatcher.max_resumes:
            self._fail(_unavailable(f'The worker failed ({lost})'))
        elif fruitless >= _MAX_FRUITLESS:
            cause = f'{fruitless} workers failed before they had a token for this request'
            message = f'{cause}, which may be why they did ({lost}).'
            self._fail(ServiceError(HTTPStatus.SERVICE_UNAVAILABLE, message))
        else:
            return True
        return False

    def _resumed(self, lost: WorkerLost) -> Arrival:
        prompt_tokens = self._generation.prompt_tokens + self._generation.delivered
        remaining = self._generation.remaining
        return replace(self._arrival, prompt_tokens=prompt_tokens, max_new_tokens=remaining, resumed=lost.reason)

    async def _relay(self, lease: Lease) -> None:
        request = GenerateRequest(lease, self._generation.input_ids, self._generation.gen_config)
        async with contextlib.aclosing(self._dispatcher.run(request)) as events:
            async for event in events:
                if event.finish_reason == 'abort':
                    await self._dispatcher.suspect(request)
                    raise WorkerLost('worker_aborted', 'the worker gave the request up')
                if event.error == PAUSED:
                    await self._dispatcher.release(request)
                    raise WorkerLost('worker_paused', 'the worker sleeps or gets other weights')
                if event.finish_reason == 'error' and is_engine_failure(event.error):
                    await self._dispatcher.suspect(request)
                    raise WorkerLost('engine_failed', f'the engine failed: {event.error}')
                if event.finish_reason == 'error':
                    self._fail(engine_error(event.error))
                    return
                self._emit(event)

    def _emit(self, event: TokenEvent) -> None:
        self._generation.take(event)
        if event.token_ids:
            self._timer.tokens()
        if self._cached_tokens is None:
            self._cached_tokens = event.cached_tokens
        if event.finish_reason is not None:
            self._finish_reason, self._finished = event.finish_reason, True
            self._end = 'stop_token' if event.finish_reason == 'stop' else 'length'
        self._events.put_nowait(event)

    def _fail(self, error: RequestError, end: EndReason = 'error') -> None:
        self._finish_reason, self._end = 'error', end
        self._events.put_nowait(error)

    def _outcome(self) -> Outcome:
        generated = self._generation.delivered
        ttft_s, tpot_s, e2e_s = self._timer.times(generated)
        return Outcome(
            self._arrival.request_id,
            self._finish_reason,
            self._generation.prompt_tokens,
            generated,
            ttft_s,
            tpot_s,
            e2e_s,
            self._end,
            self._cached_tokens,
        )


def _unavailable(what: str) -> ServiceError:
    message = f'{what}; the request may be tried again.'
    return ServiceError(HTTPStatus.SERVICE_UNAVAILABLE, message, retry_after_s=1)


class _Timer:
    """Times of one request."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_s = clock()
        self._first_s: float | None = None
        self._last_s = self._start_s

    def tokens(self) -> None:
        """Note that tokens have come."""
        self._last_s = self._clock()
        if self._first_s is None:
            self._first_s = self._last_s

    def times(self, generated: int) -> tuple[float | None, float | None, float]:
        """Return time to first token, time per further token, and time in all, in seconds."""
        e2e_s = self._clock() - self._start_s
        if self._first_s is None:
            return None, None, e2e_s
        tpot_s = (self._last_s - self._first_s) / (generated - 1) if generated > 1 else None
        return self._first_s - self._start_s, tpot_s, e2e_s
