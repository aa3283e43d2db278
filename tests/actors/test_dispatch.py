"""The ingress's side of a request against the real router in this process and workers that do as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from lmdeploy.messages import GenerationConfig
from lmdeploy.serve.core.exceptions import RequestError
from ray.exceptions import ActorDiedError, RayActorError

from actors.config import AppConfig
from actors.dispatch import Dispatcher
from actors.engine import EngineUnhealthy
from actors.messages import PAUSED, GenerateRequest, TokenEvent, WorkerReport
from actors.router import Router
from actors.sessions import unpack
from tests.patience import LIVENESS_S

PROMPT = [1, 2, 3]
LENGTH = 6


class Handle:
    """A deployment handle whose object lives here."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def options(self, **_: Any) -> Handle:
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        class Method:
            @staticmethod
            def remote(*args: Any) -> Any:
                called = method(*args)
                return asyncio.ensure_future(called) if asyncio.iscoroutine(called) else called

        return Method


class Response:
    """A stream that can be cancelled."""

    def __init__(self, events: AsyncIterator[TokenEvent]) -> None:
        self._events = events
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self._events

    def cancel(self) -> None:
        self.cancelled = True


Step = TokenEvent | Exception | None
"""An event, an error, or None to wait forever."""


class Workers:
    """Continues every prompt with its length, 100 + its length, …; scripts say what happens instead, call by call."""

    def __init__(self) -> None:
        self.scripts: list[list[Step]] = []
        self.requests: list[GenerateRequest] = []
        self.responses: list[Response] = []

    def generate(self, request: GenerateRequest) -> Response:
        self.requests.append(request)
        script = self.scripts.pop(0) if self.scripts else [self.rest(request)]
        self.responses.append(Response(self._play(script)))
        return self.responses[-1]

    @staticmethod
    def rest(request: GenerateRequest) -> TokenEvent:
        length = len(request.input_ids)
        tokens = [100 + length + n for n in range(request.gen_config.max_new_tokens)]
        return TokenEvent(tokens, finish_reason='length', cached_tokens=2)

    @staticmethod
    async def _play(script: list[Step]) -> AsyncIterator[TokenEvent]:
        for step in script:
            if step is None:
                await asyncio.Event().wait()
            elif isinstance(step, Exception):
                raise step
            else:
                yield step


def config(**router: Any) -> AppConfig:
    engine = {'device': 'cpu', 'num_gpu_blocks': 8}
    options = {'model': {'name': 'm', 'demo': 'tiny'}, 'engine': engine, 'router': router, 'metrics': {'port': None}}
    return AppConfig.model_validate(options)


class LocalRouter(Router):
    """A router without the destructor that Serve awaits."""

    def __del__(self) -> None:  # type: ignore[override]
        self._ticker.cancel()


class Bench:
    """A dispatcher with its router and workers."""

    def __init__(self, **router: Any) -> None:
        options = config(**router)
        self.router = LocalRouter(options)
        self.workers = Workers()
        self.dispatcher = Dispatcher(Handle(self.router), Handle(self.workers), 'api', options.router)

    async def report(self, *workers: str, number: int = 0) -> None:
        for worker in workers:
            await self.router.report(WorkerReport(worker, 'ready', capacity=2, number=number))

    async def ask(self, **options: Any) -> list[int]:
        """Return all tokens of one request."""
        config = GenerationConfig(max_new_tokens=LENGTH, **options.pop('gen_config', {}))
        stream = await self.dispatcher.open(PROMPT, config, **options)
        return [token for event in [event async for event in stream] for token in event.token_ids]

    async def settled(self) -> Any:
        """Return the router's numbers once the only request has ended."""
        async with asyncio.timeout(LIVENESS_S):
            while not (stats := await self.router.stats()).finished_total:
                await asyncio.sleep(0.01)
        assert stats.running == 0
        return stats


@pytest.fixture
async def bench() -> Bench:
    made = Bench()
    await made.report('a', 'b')
    return made


def died() -> ActorDiedError:
    return ActorDiedError()


EXPECTED = [103, 104, 105, 106, 107, 108]
BEGUN = TokenEvent(EXPECTED[:2])
LOSSES: list[Any] = [
    pytest.param(ActorDiedError, 'worker_died', id='died'),
    pytest.param(lambda: RayActorError(), 'engine_failed', id='unreachable'),
    pytest.param(lambda: EngineUnhealthy('closed'), 'engine_failed', id='unhealthy'),
    pytest.param(lambda: TokenEvent([], None, 'error', error='INTERNAL_ENGINE_ERROR'), 'engine_failed', id='error'),
    pytest.param(lambda: TokenEvent([], finish_reason='abort'), 'worker_aborted', id='aborted'),
]


@pytest.mark.parametrize(('loss', 'reason'), LOSSES)
@pytest.mark.parametrize('begun', [[], [BEGUN]], ids=['before', 'midway'])
async def test_another_worker_goes_on(bench: Bench, begun: list[Step], loss: Callable[[], Step], reason: str) -> None:
    bench.workers.scripts = [[*begun, loss()]]
    assert await bench.ask() == EXPECTED
    first, second = bench.workers.requests
    assert first.worker_id != second.worker_id
    assert second.input_ids == PROMPT + EXPECTED[: 2 * len(begun)]
    stats = await bench.settled()
    assert (stats.admitted_total, stats.resumed_total) == (1, {reason: 1})
    assert stats.finished_total == {'length': 1}
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (len(PROMPT), LENGTH)


async def test_a_worker_that_was_asked_to_pause_is_no_suspect() -> None:
    bench = Bench()
    await bench.report('a')
    bench.workers.scripts = [[BEGUN, TokenEvent([], finish_reason='error', error=PAUSED)]]
    assert await bench.ask() == EXPECTED, 'it reported ready again before the request was back'
    assert [request.worker_id for request in bench.workers.requests] == ['a', 'a']
    assert (await bench.settled()).resumed_total == {'worker_paused': 1}


async def test_a_request_fault_is_not_tried_again(bench: Bench) -> None:
    bench.workers.scripts = [[TokenEvent([], finish_reason='error', error='INPUT_LENGTH_ERROR')]]
    with pytest.raises(RequestError):
        await bench.ask()
    assert len(bench.workers.requests) == 1


async def test_an_answer_that_was_complete_but_for_its_end(bench: Bench) -> None:
    bench.workers.scripts = [[TokenEvent(EXPECTED), died()]]
    assert await bench.ask() == EXPECTED
    assert len(bench.workers.requests) == 1
    assert (await bench.settled()).finished_total == {'length': 1}


async def test_what_cannot_go_on_elsewhere_says_so(bench: Bench) -> None:
    bench.workers.scripts = [[BEGUN, died()]]
    with pytest.raises(RequestError, match='response_format cannot go on elsewhere'):
        await bench.ask(gen_config={'response_format': {'type': 'json_object'}})
    assert (await bench.settled()).finished_total == {'error': 1}


async def test_it_does_not_go_on_for_ever() -> None:
    bench = Bench(max_resumes=2)
    await bench.report(*'abcd')
    bench.workers.scripts = [[TokenEvent([token]), died()] for token in EXPECTED[:4]]
    with pytest.raises(RequestError, match='ActorDiedError'):
        await bench.ask()
    assert len(bench.workers.requests) == 3


async def test_a_request_that_ends_workers_does_not_go_round_them_all() -> None:
    bench = Bench(max_resumes=10)
    await bench.report(*'abcd')
    bench.workers.scripts = [[BEGUN, died()], *[[died()]] * 3]
    with pytest.raises(RequestError, match='2 workers failed before they had a token for this request'):
        await bench.ask()
    assert len(bench.workers.requests) == 3, 'a token in between starts the count anew'


async def test_it_waits_for_a_worker_to_come_back() -> None:
    bench = Bench()
    await bench.report('a')
    bench.workers.scripts = [[BEGUN, died()]]
    asking = asyncio.create_task(bench.ask())
    async with asyncio.timeout(LIVENESS_S):
        while not (await bench.router.stats()).queued:
            await asyncio.sleep(0.01)
    await bench.report('b')
    assert await asking == EXPECTED


async def test_nobody_is_left_to_go_on() -> None:
    bench = Bench(resume_wait_s=0.0)
    await bench.report('a')
    bench.workers.scripts = [[BEGUN, died()]]
    with pytest.raises(RequestError, match='No worker'):
        await bench.ask()
    assert (await bench.settled()).finished_total == {'error': 1}


async def test_a_reader_that_leaves_ends_the_request(bench: Bench) -> None:
    bench.workers.scripts = [[BEGUN, None]]
    stream = await bench.dispatcher.open(PROMPT, GenerationConfig(max_new_tokens=LENGTH))
    stream.close()
    stats = await bench.settled()
    assert bench.workers.responses[0].cancelled
    assert stats.finished_total == {'abort': 1}


async def test_a_deadline_ends_the_request(bench: Bench) -> None:
    bench.workers.scripts = [[BEGUN, None]]
    with pytest.raises(RequestError, match='deadline'):
        await bench.ask(timeout_s=0.05)
    await bench.settled()
    assert bench.workers.responses[0].cancelled


async def test_a_session_is_remembered(bench: Bench) -> None:
    stream = await bench.dispatcher.open(PROMPT, GenerationConfig(max_new_tokens=LENGTH), 's')
    assert [event async for event in stream]
    await stream.keep(4)
    assert await bench.dispatcher.history('s') == PROMPT + EXPECTED[:4]
    assert unpack(await bench.router.history('t')) == []
    stats = await bench.settled()
    assert stats.sessions.by_state == {'running': 0, 'resident': 0, 'cold': 1}
    assert (stats.sessions.prefix_hits_total, stats.sessions.reused_tokens_total) == (1, 2)


async def test_a_session_has_no_history_while_the_router_is_away(bench: Bench) -> None:
    class Away:
        async def history(self, session: str) -> bytes:
            raise RayActorError()

        async def renew(self, *_: Any) -> None:
            raise RayActorError()

    lonely = Dispatcher(Handle(Away()), Handle(bench.workers), 'api', config().router)
    assert await lonely.history('s') == []
