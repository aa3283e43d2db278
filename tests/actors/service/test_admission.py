"""Overload, loading, deadlines and fairness over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, RateLimitError

from tests.actors.service.conftest import MODEL, QUEUED, RUNNING, Service
from tests.actors.service.requests import ask, chat
from tests.patience import LIVENESS_S

FOREVER = 1900
"""Tokens of a request that runs until it is aborted."""


@contextlib.asynccontextmanager
async def busy(client: AsyncOpenAI, service: Service, queued: int = 0, **options: Any) -> AsyncIterator[None]:
    """Fill all workers, and `queued` places of the queue."""
    tasks = [
        asyncio.create_task(client.chat.completions.create(**chat(f'busy {number}', FOREVER, **options)))
        for number in range(RUNNING + queued)
    ]
    try:
        await service.until(lambda stats: (stats.running, stats.queued) == (RUNNING, queued))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize('stream', [False, True], ids=['whole', 'stream'])
async def test_overload_is_429_with_retry_after(client: AsyncOpenAI, service: Service, stream: bool) -> None:
    before = (await service.stats()).rejected_total.get('queue_full', 0)
    async with busy(client, service, queued=QUEUED):
        results = await asyncio.gather(
            *(client.chat.completions.create(**chat('late', 4), stream=stream) for _ in range(5)),
            return_exceptions=True,
        )
    for error in results:
        assert isinstance(error, RateLimitError)
        assert error.response.headers['retry-after'].isdecimal()
        assert error.code == 'rate_limit_exceeded'
        assert error.body is not None
    assert (await service.stats()).rejected_total['queue_full'] == before + 5


async def test_a_hot_session_does_not_push_others_out(client: AsyncOpenAI, service: Service) -> None:
    hot = {'extra_headers': {'x-session-id': 'hot'}}
    async with busy(client, service):
        flood = [asyncio.create_task(client.chat.completions.create(**chat('hot', 4), **hot)) for _ in range(QUEUED)]
        await service.until(lambda stats: stats.queued == QUEUED)
        cold = asyncio.create_task(ask(client, 'cold', 4))
        done, _ = await asyncio.wait(flood, timeout=LIVENESS_S, return_when=asyncio.FIRST_COMPLETED)
        errors = [task.exception() for task in done]
        assert len(errors) == 1
        assert isinstance(errors[0], RateLimitError)
        assert not cold.done()
    assert (await cold).completion_tokens == 4
    await asyncio.gather(*flood, return_exceptions=True)


async def test_a_deadline_in_the_queue_is_504_before_any_work(client: AsyncOpenAI, service: Service) -> None:
    before = (await service.stats()).rejected_total.get('deadline', 0)
    async with busy(client, service):
        with pytest.raises(APIStatusError) as caught:
            await client.chat.completions.create(**chat('late', 4), extra_headers={'x-request-timeout-seconds': '2'})
        assert (await service.stats()).running == RUNNING
    assert caught.value.status_code == 504
    assert caught.value.code == 'deadline_exceeded'
    assert (await service.stats()).rejected_total['deadline'] == before + 1


async def test_a_deadline_in_the_form_of_anthropic(
    client: AsyncOpenAI, http: aiohttp.ClientSession, service: Service
) -> None:
    body = {'model': MODEL, 'max_tokens': 4, 'messages': [{'role': 'user', 'content': 'late'}]}
    headers = {'x-request-timeout-seconds': '2', 'anthropic-version': '2023-06-01'}
    late = http.post('/v1/messages', json=body, headers=headers)
    async with busy(client, service), late as response:
        answer = await response.json()
    assert (response.status, answer['type'], answer['error']['type']) == (504, 'error', 'timeout_error')


async def test_a_deadline_in_a_stream_is_an_error_event(client: AsyncOpenAI) -> None:
    seconds = 3
    while True:
        try:
            stream = await client.chat.completions.create(
                **chat('long', FOREVER), stream=True, extra_headers={'x-request-timeout-seconds': str(seconds)}
            )
            break
        except APIStatusError as late:  # on a busy machine the first token may take longer
            assert late.code == 'deadline_exceeded'
            seconds *= 2
    with pytest.raises(APIError, match='deadline'):
        async for _ in stream:
            pass


async def test_a_deadline_that_is_no_number(client: AsyncOpenAI) -> None:
    with pytest.raises(APIStatusError, match='expected a positive number of seconds') as caught:
        await client.chat.completions.create(**chat('a', 1), extra_headers={'x-request-timeout-seconds': 'soon'})
    assert caught.value.status_code == 400


async def test_waiting_requests_run_when_a_worker_is_free(client: AsyncOpenAI, service: Service) -> None:
    async with busy(client, service):
        waiting = [asyncio.create_task(ask(client, f'waits {number}', 4)) for number in range(QUEUED)]
        await service.until(lambda stats: stats.queued == QUEUED)
    assert [(await task).completion_tokens for task in waiting] == [4] * QUEUED


async def test_a_waiting_client_that_gives_up_leaves_the_queue(client: AsyncOpenAI, service: Service) -> None:
    session = {'extra_headers': {'x-session-id': 'impatient'}}
    async with busy(client, service):
        asking = asyncio.create_task(client.chat.completions.create(**chat('impatient', 4), **session))
        await service.until(lambda stats: stats.queued == 1)
        asking.cancel()
        await service.until(lambda stats: stats.queued == 0)
        next_turn = asyncio.create_task(client.chat.completions.create(**chat('next turn', 4), **session))
        await service.until(lambda stats: stats.queued == 1)
    assert (await next_turn).usage.completion_tokens == 4
