"""The OpenAI, Anthropic and Responses APIs as clients use them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from openai import APIStatusError, AsyncOpenAI

from tests.actors.service.conftest import MODEL, Service
from tests.actors.service.requests import ask, ask_in_pieces, chat, prompts

NOTHING_SPECIAL: dict[str, Any] = {}


async def test_the_model_is_listed(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]


@pytest.mark.parametrize('path', ['/health', '/ready', '/anthropic/v1/models'])
async def test_probes(http: aiohttp.ClientSession, path: str) -> None:
    async with http.get(path) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    'options',
    [
        pytest.param(NOTHING_SPECIAL, id='greedy'),
        pytest.param({'logprobs': True, 'top_logprobs': 2}, id='logprobs'),
        pytest.param({'ignore_eos': False, 'seed': 3}, id='may-stop'),
    ],
)
async def test_a_stream_says_what_a_whole_answer_says(client: AsyncOpenAI, options: dict[str, Any]) -> None:
    for prompt in prompts(3):
        whole = await ask(client, prompt, 60, **options)
        streamed, _ = await ask_in_pieces(client, prompt, 60, **options)
        assert streamed == whole
        assert whole.completion_tokens == 60 or whole.finish_reason == 'stop'
        assert whole.logprobs == (whole.completion_tokens if 'logprobs' in options else 0)


async def test_a_busy_engine_says_what_an_idle_one_says(client: AsyncOpenAI) -> None:
    alone = [await ask(client, prompt, 40) for prompt in prompts(4)]
    together = await asyncio.gather(*(ask_in_pieces(client, prompt, 40) for prompt in prompts(4)))
    assert [answer for answer, _ in together] == alone


@pytest.mark.parametrize('stream', [False, True], ids=['whole', 'stream'])
async def test_more_choices_than_may_run_at_once(client: AsyncOpenAI, stream: bool) -> None:
    options = chat('many', 12, n=6)
    single = await ask(client, 'many', 12)
    texts = [''] * 6
    if stream:
        async for chunk in await client.chat.completions.create(**options, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ''
    else:
        got = await client.chat.completions.create(**options)
        texts = [choice.message.content or '' for choice in got.choices]
        assert got.usage.completion_tokens == 6 * 12
    assert texts == [single.text] * 6


@pytest.mark.parametrize('stream', [False, True], ids=['whole', 'stream'])
async def test_a_stop_string_over_several_tokens(client: AsyncOpenAI, stream: bool) -> None:
    whole = await ask(client, 'stop me', 80)
    at = next(at for at in range(20, 60) if whole.text[at : at + 3].isascii())
    stop = whole.text[at : at + 3]
    cut = whole.text[: whole.text.index(stop)]
    if stream:
        answer, pieces = await ask_in_pieces(client, 'stop me', 80, stop=[stop])
        assert len(pieces) > 1
    else:
        answer = await ask(client, 'stop me', 80, stop=[stop])
    assert (answer.text, answer.finish_reason) == (cut, 'stop')
    assert 0 < answer.completion_tokens < whole.completion_tokens


async def test_completions(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {
        'model': MODEL, 'prompt': 'once upon', 'max_tokens': 30, 'temperature': 0, 'extra_body': {'ignore_eos': True},
    }  # fmt: skip
    whole = await client.completions.create(**options)
    text, usage = '', None
    async for chunk in await client.completions.create(**options, stream=True, stream_options={'include_usage': True}):
        text += ''.join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].text
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.completion_tokens == 30
    several = await client.completions.create(**{**options, 'prompt': ['once upon', 'once upon']})
    assert [choice.text for choice in several.choices] == [text, text]


async def test_responses(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {'model': MODEL, 'input': 'hello', 'max_output_tokens': 20, 'temperature': 0}
    whole = await client.responses.create(**options)
    text = ''
    async for event in await client.responses.create(**options, stream=True):
        if event.type == 'response.output_text.delta':
            text += event.delta
    assert text == whole.output_text
    assert whole.usage is not None and whole.usage.output_tokens > 0


async def test_anthropic_messages(client: AsyncOpenAI, http: aiohttp.ClientSession) -> None:
    body = {'model': MODEL, 'max_tokens': 20, 'temperature': 0, 'messages': [{'role': 'user', 'content': 'hello'}]}
    headers = {'anthropic-version': '2023-06-01'}
    async with http.post('/v1/messages', json=body, headers=headers) as response:
        whole = await response.json()
    text = ''
    async with http.post('/v1/messages', json={**body, 'stream': True}, headers=headers) as response:
        async for line in response.content:
            if line.startswith(b'data: '):
                event = json.loads(line.removeprefix(b'data: '))
                text += event.get('delta', {}).get('text', '')
    assert text == whole['content'][0]['text']
    assert whole['usage']['output_tokens'] > 0


@pytest.mark.parametrize(
    ('change', 'extra_headers', 'status', 'kind'),
    [
        pytest.param({'model': 'other'}, {}, 404, 'not_found_error', id='model'),
        pytest.param({'max_tokens': 'x'}, {}, 400, 'invalid_request_error', id='type'),
        pytest.param({}, {'x-request-timeout-seconds': 'soon'}, 400, 'invalid_request_error', id='deadline'),
    ],
)
async def test_anthropic_errors_have_its_form(
    http: aiohttp.ClientSession, change: dict[str, Any], extra_headers: dict[str, str], status: int, kind: str
) -> None:
    body = {'model': MODEL, 'max_tokens': 20, 'messages': [{'role': 'user', 'content': 'hello'}], **change}
    headers = {'anthropic-version': '2023-06-01', **extra_headers}
    async with http.post('/v1/messages', json=body, headers=headers) as response:
        answer = await response.json()
    assert response.status == status
    assert answer['type'] == 'error'
    assert answer['error']['type'] == kind
    assert answer['error']['message']


@pytest.mark.parametrize(
    ('path', 'body', 'status', 'code'),
    [
        pytest.param('chat/completions', {'model': 'other'}, 404, 'model_not_found', id='model'),
        pytest.param('completions', {'model': 'other', 'prompt': 'a'}, 404, 'model_not_found', id='completions-model'),
        pytest.param('responses', {'model': 'other', 'input': 'a'}, 404, 'model_not_found', id='responses-model'),
        pytest.param('chat/completions', {'temperature': 9}, 400, None, id='temperature'),
        pytest.param('chat/completions', {'messages': 5}, 400, None, id='type'),
        pytest.param('chat/completions', {'messages': None}, 400, None, id='missing'),
        pytest.param('chat/completions', {'max_tokens': 0}, 400, None, id='max-tokens'),
        pytest.param(
            'chat/completions',
            {'messages': [{'role': 'user', 'content': 'a' * 5000}]},
            400,
            'context_length_exceeded',
            id='context',
        ),
        pytest.param(
            'chat/completions',
            {'messages': [{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'x'}}]}]},
            400,
            'invalid_request',
            id='image',
        ),
        pytest.param('completions', {'prompt': 'a', 'n': 2}, 400, None, id='completions-n'),
        pytest.param('completions', {'prompt': 'a', 'logprobs': 1}, 400, None, id='completions-logprobs'),
        pytest.param('completions', {'prompt': ['a', 'b'], 'stream': True}, 400, None, id='completions-streams'),
        pytest.param('no/such/path', {}, 404, None, id='path'),
    ],
)  # fmt: skip
async def test_errors_have_openai_form(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], status: int, code: str | None
) -> None:
    base = {'model': MODEL, 'messages': [{'role': 'user', 'content': 'a'}]} if path == 'chat/completions' else {}
    sent = {'model': MODEL, **base, **body}
    async with http.post(f'/v1/{path}', json={key: value for key, value in sent.items() if value is not None}) as got:
        answer = await got.json()
    assert got.status == status, answer
    assert set(answer) == {'error'}
    assert set(answer['error']) == {'message', 'type', 'param', 'code'}
    assert answer['error']['message']
    assert code is None or answer['error']['code'] == code


async def test_a_body_that_is_no_json(http: aiohttp.ClientSession) -> None:
    headers = {'content-type': 'application/json'}
    async with http.post('/v1/chat/completions', data='{"model": ', headers=headers) as got:
        answer = await got.json()
    assert got.status == 400
    assert answer['error']['type'] == 'invalid_request_error'


async def test_management_of_a_single_engine_is_not_served(http: aiohttp.ClientSession) -> None:
    for path in ('/terminate', '/is_sleeping'):
        async with http.get(path) as got:
            assert got.status == 404


async def test_clients_see_error_classes(client: AsyncOpenAI, service: Service) -> None:
    with pytest.raises(APIStatusError) as caught:
        await client.chat.completions.create(model='other', messages=[])
    assert caught.value.status_code == 404
    assert caught.value.code == 'model_not_found'


async def test_more_choices_than_there_are_tokens(client: AsyncOpenAI) -> None:
    options = {'temperature': 1, 'extra_body': {'ignore_eos': True, 'top_k': 2**31 - 1}}
    assert (await ask(client, 'any token', 4, **options)).completion_tokens == 4


@pytest.mark.parametrize('prompt', [[65, 66], [5, {'role': 'user'}], [{'type': {}}]], ids=str)
async def test_a_prompt_that_is_no_text_is_no_fault_of_ours(http: aiohttp.ClientSession, prompt: object) -> None:
    async with http.post('/v1/completions', json={'model': MODEL, 'prompt': prompt, 'max_tokens': 2}) as response:
        assert response.status in (200, 400)
