"""What the engine cannot run is refused with the name of the field, before the engine sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from lmdeploy.serve.core.exceptions import RequestError
from lmdeploy.serve.openai.api_server import validation_exception_handler
from starlette.testclient import TestClient

from actors.request_checks import check_body, check_messages, check_prompt, check_text


@pytest.fixture(scope='module')
def client() -> TestClient:
    app = FastAPI(dependencies=[Depends(check_body)])
    for path in ('/v1/chat/completions', '/v1/completions'):
        app.add_api_route(path, lambda: {'ok': True}, methods=['GET', 'POST'])
    app.add_exception_handler(RequestValidationError, validation_exception_handler)
    return TestClient(app)


@pytest.mark.parametrize(
    ('body', 'message'),
    [
        pytest.param({'min_p': -0.1}, 'min_p: expected a number from 0 to 1, got -0.1', id='low'),
        pytest.param({'min_p': 1.1}, 'min_p: expected', id='high'),
        pytest.param({'min_p': '1.1'}, "min_p: expected a number from 0 to 1, got '1.1'", id='in-quotes'),
        pytest.param({'temperature': float('nan')}, 'temperature: expected', id='nan'),
        pytest.param({'repetition_penalty': 1e300}, 'repetition_penalty: expected', id='beyond-float32'),
        pytest.param({'seed': 2**63}, 'seed: expected', id='beyond-int64'),
        pytest.param({'top_k': 2**31}, 'top_k: expected', id='beyond-int32'),
        pytest.param({'max_tokens': 0}, 'max_tokens: expected', id='no-tokens'),
        pytest.param({'logit_bias': {'5': 1e39}}, 'logit_bias: expected numbers from -100 to 100', id='bias'),
        pytest.param({'migration_request': {'protocol': 1}}, 'migration_request: not supported here', id='migration'),
    ],
)
@pytest.mark.parametrize('path', ['/v1/chat/completions', '/v1/completions'])
def test_what_cannot_run(client: TestClient, path: str, body: dict[str, Any], message: str) -> None:
    response = client.post(path, content=json.dumps(body))
    assert response.status_code == 400
    assert response.json()['message'].startswith(message)


def test_completions_take_no_null_for_n(client: TestClient) -> None:
    assert client.post('/v1/completions', json={'prompt': 'a', 'n': None}).status_code == 400
    assert client.post('/v1/chat/completions', json={'n': None}).status_code == 200


@pytest.mark.parametrize(
    'content',
    [
        pytest.param(b'', id='nothing'),
        pytest.param(b'{', id='no-json'),
        pytest.param(b'[1]', id='no-object'),
        pytest.param(b'{"min_p": null, "top_p": 1, "temperature": 0, "seed": -5, "top_k": "40"}', id='fine'),
        pytest.param(b'{"min_p": "low", "logit_bias": 5}', id='for-the-schema'),
        pytest.param(b'{"logit_bias": {"5": -100}, "logprobs": true, "with_cache": false}', id='fine-too'),
    ],
)
def test_what_others_decide(client: TestClient, content: bytes) -> None:
    assert client.post('/v1/chat/completions', content=content).status_code == 200
    assert client.get('/v1/chat/completions').status_code == 200


@pytest.mark.parametrize(
    ('input_ids', 'message'),
    [
        pytest.param([], 'no tokens', id='none'),
        pytest.param([5, -1], r'must be in \[0, 10\)', id='negative'),
        pytest.param([10, 5], r'must be in \[0, 10\)', id='too-large'),
    ],
)
def test_prompts_that_end_the_engine(input_ids: list[int], message: str) -> None:
    check_prompt([0, 9], 10)
    with pytest.raises(RequestError, match=message):
        check_prompt(input_ids, 10)


def test_messages_that_the_template_does_not_take() -> None:
    class Template:
        def messages2prompt(self, messages: list[dict[str, str]]) -> str:
            return messages[-1]['content']

    template = Template()
    check_messages(template)
    assert template.messages2prompt([{'content': 'hello'}]) == 'hello'
    for messages in ([], [{}]):
        with pytest.raises(ValueError, match='chat template does not take these messages'):
            template.messages2prompt(messages)


@pytest.mark.parametrize('kind', ['image_url', 'video_url', 'audio_url'])
def test_a_part_that_is_no_text_is_named(kind: str) -> None:
    text = {'type': 'text', 'text': 'What is it?'}
    check_text([{'role': 'user', 'content': [text]}, {'role': 'assistant', 'content': None}])
    messages = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': [text, {'type': kind}]}]
    with pytest.raises(RequestError) as caught:
        check_text(messages)
    assert str(caught.value).startswith(f"messages[1].content[1].type: got '{kind}'; the model is served as text only")


@pytest.mark.parametrize(
    'messages',
    ['a prompt', None, [5], ['text'], [{'content': ['no mapping']}], [{'content': [{'type': {}}]}]],
    ids=str,
)
def test_what_holds_no_parts_is_left_to_others(messages: Any) -> None:
    check_text(messages)
