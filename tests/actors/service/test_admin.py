"""Sleep, wake-up and reload over HTTP: who may, what becomes of requests, and that trouble has a name."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import APIError, AsyncOpenAI, InternalServerError

from replayssm import demo
from tests.actors.service.conftest import ADMIN_TOKEN, Service
from tests.actors.service.requests import ask, chat
from tests.patience import LIVENESS_S


@pytest.fixture
async def admin(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    """An administrator's HTTP client."""
    headers = {'authorization': f'Bearer {ADMIN_TOKEN}'}
    async with aiohttp.ClientSession(service.url, headers=headers, timeout=aiohttp.ClientTimeout(LIVENESS_S)) as made:
        yield made


async def post(admin: aiohttp.ClientSession, action: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with admin.post(f'/admin/{action}', json=body) as response:
        return response.status, await response.json()


async def done(admin: aiohttp.ClientSession, action: str, **body: Any) -> dict[str, Any]:
    """Carry out an action that must work; return what it says of the only worker."""
    status, answer = await post(admin, action, **body)
    assert status == HTTPStatus.OK, answer
    (worker,) = answer['workers']
    assert worker['outcome'] == 'done'
    return dict(worker)


async def test_asleep_and_awake(client: AsyncOpenAI, service: Service, admin: aiohttp.ClientSession) -> None:
    before = await ask(client, 'awake', 20)
    for level in (1, 2):
        assert (await done(admin, 'sleep', level=level))['state'] == 'sleeping'
        async with admin.get('/ready') as response:
            assert response.status == HTTPStatus.SERVICE_UNAVAILABLE
            assert (await response.json())['status'] == 'sleeping'
        with pytest.raises(InternalServerError) as caught:
            await ask(client, 'asleep', 4)
        assert caught.value.status_code == HTTPStatus.SERVICE_UNAVAILABLE
        assert (await done(admin, 'wakeup'))['state'] == 'ready'
        assert await ask(client, 'awake', 20) == before
    status, answer = await post(admin, 'wakeup')
    assert status == HTTPStatus.CONFLICT
    assert answer['workers'][0]['message'] == 'wakeup: the engine is ready, expected sleeping'


async def test_other_weights_and_back(
    client: AsyncOpenAI, service: Service, admin: aiohttp.ClientSession, tmp_path: Path
) -> None:
    demo.write(replace(demo.SPECS['tiny'], seed=9), 'float32', tmp_path)
    before = await ask(client, 'weights', 20)
    first = await done(admin, 'reload', path=str(tmp_path))
    other = await ask(client, 'weights', 20)
    assert other != before
    assert await done(admin, 'reload') == first | {'weights_version': first['weights_version'] + 1}
    assert await ask(client, 'weights', 20) == other, 'without a path it is the present folder'
    await done(admin, 'reload', path=str(demo.ensure('tiny')))
    assert await ask(client, 'weights', 20) == before
    reported = await service.until_idle()
    assert reported.workers[0].weights_version == first['weights_version'] + 2


async def test_another_architecture_is_refused_and_changes_nothing(
    client: AsyncOpenAI, service: Service, admin: aiohttp.ClientSession
) -> None:
    before = await ask(client, 'same', 20)
    stream = await client.chat.completions.create(**chat('goes on', 300), stream=True)
    status, answer = await post(admin, 'reload', path=str(demo.ensure('odd')))
    assert status == HTTPStatus.CONFLICT
    (worker,) = answer['workers']
    assert worker['outcome'] == 'refused'
    assert 'differs in config.json: text_config.' in worker['message']
    assert worker['state'] == 'ready'
    reasons = [chunk.choices[0].finish_reason async for chunk in stream]
    assert reasons[-1] == 'length'
    assert await ask(client, 'same', 20) == before


async def test_running_requests_end_in_time(
    client: AsyncOpenAI, service: Service, admin: aiohttp.ClientSession
) -> None:
    short = await client.chat.completions.create(**chat('in time', 100), stream=True)
    assert (await done(admin, 'reload', timeout_s=LIVENESS_S))['ended'] == 0
    assert [chunk.choices[0].finish_reason async for chunk in short][-1] == 'length'

    stream = await client.chat.completions.create(**chat('too long', 1900), stream=True)
    assert (await done(admin, 'reload', timeout_s=0))['ended'] == 1
    # It went on with the new weights if they were there before it was refused.
    with contextlib.suppress(APIError):
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == 'length'
    assert (await ask(client, 'after', 4)).completion_tokens == 4


@pytest.mark.parametrize(
    ('body', 'status', 'message'),
    [
        pytest.param({'worker_id': 'nobody'}, HTTPStatus.NOT_FOUND, "worker_id: got 'nobody'; there is ", id='worker'),
        pytest.param({'levle': 2}, HTTPStatus.BAD_REQUEST, 'levle', id='misspelt'),
        pytest.param({'level': 3}, HTTPStatus.BAD_REQUEST, 'level', id='level'),
    ],
)
async def test_what_makes_no_sense_is_named(
    admin: aiohttp.ClientSession, body: dict[str, Any], status: HTTPStatus, message: str
) -> None:
    given, answer = await post(admin, 'sleep', **body)
    assert given == status
    assert message in str(answer)


async def test_only_administrators(http: aiohttp.ClientSession) -> None:
    for action in ('sleep', 'wakeup', 'reload'):
        async with http.post(f'/admin/{action}', json={}) as response:
            assert response.status == HTTPStatus.UNAUTHORIZED
