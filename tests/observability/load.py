"""Traffic with everything that operators see: answers, refusals, and clients that hang up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import aiohttp

from tests.observability.conftest import MODEL, QUEUED, RUNNING, Service
from tests.patience import LIVENESS_S

_REFUSALS = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def chat(content: str, max_tokens: int, **options: Any) -> dict[str, Any]:
    """Return the body of a chat completion that ends at `max_tokens` alone."""
    messages = [{'role': 'user', 'content': content}]
    return {'model': MODEL, 'messages': messages, 'max_tokens': max_tokens, 'ignore_eos': True, **options}


async def ask(
    http: aiohttp.ClientSession, content: str, max_tokens: int, session: str | None = None
) -> dict[str, Any] | None:
    """Return the usage of one answer, None when the request was refused."""
    headers = {'x-session-id': session} if session else None
    async with http.post('/v1/chat/completions', json=chat(content, max_tokens), headers=headers) as response:
        if response.status in _REFUSALS:
            return None
        response.raise_for_status()
        usage: dict[str, Any] = (await response.json())['usage']
        return usage


async def hang_up(http: aiohttp.ClientSession) -> None:
    """Read a little of a stream and close it."""
    async with http.post('/v1/chat/completions', json=chat('bye', 400, stream=True)) as response:
        await response.content.readany()
        response.close()


@contextlib.asynccontextmanager
async def client(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that opens a connection for every request, so that both ingress replicas get some."""
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(LIVENESS_S)
    async with aiohttp.ClientSession(service.url, connector=connector, timeout=timeout) as made:
        yield made


@contextlib.asynccontextmanager
async def load(service: Service) -> AsyncIterator[None]:
    """More requests than the deployment takes, for as long as the context lasts."""
    async with client(service) as http:

        async def forever(number: int) -> None:
            while True:
                if number == 0:
                    await hang_up(http)
                else:
                    await ask(http, f'{number}: ' + 'more ' * number, 24, session=f'chat-{number}')
                # A refused client that tries again at once would only keep the ingress busy.
                await asyncio.sleep(0.2)

        tasks = [asyncio.create_task(forever(number)) for number in range(RUNNING + QUEUED + 2)]
        try:
            yield
            for task in tasks:
                assert not task.done(), task.exception()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
