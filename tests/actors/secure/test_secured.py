"""What a deployment on a public address lets in, and what it writes down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.actors.secure.conftest import KEY, MAX_BODY_BYTES, MODEL, Secured
from tests.patience import LIVENESS_S

BEARER = {'authorization': f'Bearer {KEY}'}
CANARY = 'canary7f3a'


def chat(content: str = 'hello', **options: Any) -> dict[str, Any]:
    return {'model': MODEL, 'messages': [{'role': 'user', 'content': content}], 'max_tokens': 4, **options}


@pytest.mark.parametrize('headers', [BEARER, {'x-api-key': KEY}], ids=['bearer', 'x-api-key'])
async def test_a_key_opens_the_api(http: aiohttp.ClientSession, headers: dict[str, str]) -> None:
    async with http.post('/v1/chat/completions', json=chat(), headers=headers) as response:
        assert response.status == 200, await response.text()
        assert (await response.json())['usage']['completion_tokens'] > 0


@pytest.mark.parametrize(
    ('path', 'status'),
    [
        ('/health', 200),
        ('/ready', 200),
        ('/v1/models', 401),
        ('/anthropic/v1/models', 401),
        ('/openapi.json', 401),
        ('/docs', 401),
        ('/no/such/path', 401),
        ('/ui', 200),
        ('/ui/app.js', 200),
        ('/ui/state', 401),
        ('/ui/../state', 401),
    ],
)
async def test_without_a_key(http: aiohttp.ClientSession, path: str, status: int) -> None:
    async with http.get(path) as response:
        assert response.status == status


async def test_errors_have_the_form_of_their_api(http: aiohttp.ClientSession) -> None:
    async with http.post('/v1/chat/completions', json=chat()) as response:
        answer = await response.json()
        assert (response.status, response.headers['www-authenticate']) == (401, 'Bearer')
    assert (answer['error']['type'], answer['error']['code']) == ('authentication_error', 'invalid_api_key')
    async with http.post('/v1/messages', json=chat(), headers={'x-api-key': 'wrong'}) as response:
        answer = await response.json()
        assert (response.status, response.headers['www-authenticate']) == (401, 'Bearer')
    assert (answer['type'], answer['error']['type']) == ('error', 'authentication_error')


async def test_a_browser_may_ask_before_it_sends_its_key(http: aiohttp.ClientSession) -> None:
    origin = {'origin': 'https://app.example'}
    asks = {**origin, 'access-control-request-method': 'POST', 'access-control-request-headers': 'authorization'}
    async with http.options('/v1/chat/completions', headers=asks) as response:
        assert response.status == 200
    async with http.post('/v1/chat/completions', json=chat(), headers=origin) as response:
        assert response.status == 401
        assert response.headers['access-control-allow-origin'] == 'https://app.example'


async def test_keys_change_without_a_restart(http: aiohttp.ClientSession, secured: Secured) -> None:
    async def status(key: str) -> int:
        async with http.get('/v1/models', headers={'x-api-key': key}) as response:
            return response.status

    assert [await status(KEY), await status('fresh')] == [200, 401]
    kept = secured.keys.read_text()
    try:
        secured.keys.write_text('fresh\n')
        assert [await status(KEY), await status('fresh')] == [401, 200]
    finally:
        secured.keys.write_text(kept)
    assert [await status(KEY), await status('fresh')] == [200, 401]


@pytest.mark.parametrize('chunked', [False, True], ids=['with-length', 'chunked'])
async def test_a_body_that_is_too_large(http: aiohttp.ClientSession, chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b'x' * (MAX_BODY_BYTES // 10)

    body = pieces() if chunked else b'x' * (2 * MAX_BODY_BYTES)
    headers = {**BEARER, 'content-type': 'application/json'}
    async with http.post('/v1/chat/completions', data=body, headers=headers) as response:
        answer = await response.json()
    assert response.status == 413
    assert answer['error']['code'] == 'request_too_large'
    async with http.post('/v1/chat/completions', json=chat(), headers=BEARER) as response:
        assert response.status == 200


async def test_headers_that_are_too_large(http: aiohttp.ClientSession) -> None:
    headers = {**BEARER, **{f'x-{number}': 'x' * 4000 for number in range(10)}}
    async with http.get('/v1/models', headers=headers) as response:
        assert response.status == 431


async def test_logs_say_nothing_of_what_was_said(http: aiohttp.ClientSession, secured: Secured) -> None:
    """With every logger at its most talkative, also where requests fail."""
    bodies = [
        ('/v1/chat/completions', chat(f'1 {CANARY}')),
        ('/v1/chat/completions', chat(f'2 {CANARY}', stream=True)),
        ('/v1/chat/completions', chat(f'3 {CANARY}' + ' x' * 2000)),
        ('/v1/chat/completions', chat(f'4 {CANARY}', stop=[CANARY], user=CANARY)),
        ('/v1/chat/completions', chat(f'5 {CANARY}', temperature=9)),
        ('/v1/chat/completions', {'model': MODEL, 'messages': [{'role': CANARY, 'content': CANARY}]}),
        ('/v1/chat/completions', {'model': MODEL, 'messages': [{'role': 'user', 'content': [{'type': CANARY}]}]}),
        ('/v1/completions', {'model': MODEL, 'prompt': f'6 {CANARY}', 'max_tokens': 4}),
        ('/v1/completions', {'model': MODEL, 'prompt': [f'7 {CANARY}', 7]}),
        ('/v1/messages', chat(f'8 {CANARY}')),
        ('/v1/responses', {'model': MODEL, 'input': f'9 {CANARY}', 'max_output_tokens': 4}),
        (f'/v1/models?q={CANARY}', {}),
    ]
    headers = {**BEARER, 'anthropic-version': '2023-06-01', 'x-session-id': f'session-{CANARY}'}
    for path, body in bodies:
        async with http.post(path, json=body, headers=headers) as response:
            await response.read()
            assert response.status < 500, await response.text()
    # The last of them is in the log when the requests before it are.
    async with asyncio.timeout(LIVENESS_S):
        while not any('/v1/responses' in text for text in logs(secured).values()):
            await asyncio.sleep(0.2)
    assert [str(path) for path, text in logs(secured).items() if CANARY in text or KEY in text] == []
    assert any('input_tokens=' in text for text in logs(secured).values()), 'LMDeploy was meant to write its log'


def logs(secured: Secured) -> dict[Path, str]:
    files = [path for path in secured.logs.rglob('*') if path.is_file()]
    return {path: path.read_text(errors='replace') for path in files}


async def test_plain_http_is_not_answered(secured: Secured) -> None:
    async with aiohttp.ClientSession() as plain:
        with pytest.raises(aiohttp.ClientError):
            await plain.get(secured.url.replace('https', 'http') + '/health')
