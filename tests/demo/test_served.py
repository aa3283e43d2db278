"""`deploy/local.yaml` over HTTP: answers that can be read, stop strings, usage, and accepted drafts in the metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from actors.serve_file import load
from replayssm import demo
from tests.actors.service.conftest import Service, serving
from tests.patience import LIVENESS_S
from tests.ports import free_port

FILE = Path(__file__).parents[2] / 'deploy/local.yaml'
METRICS_PORT = free_port()
COUNT = [{'role': 'user', 'content': 'Count from 3 to 9.'}]


@pytest.fixture(scope='module')
def service() -> Iterator[Service]:
    _, config = load(FILE)
    metrics = config.metrics.model_copy(update={'port': METRICS_PORT})
    with serving(config.model_copy(update={'metrics': metrics})) as made:
        yield made


async def chat(service: Service, messages: list[dict[str, str]], **options: object) -> tuple[str, str, tuple[int, int]]:
    """Return text, reason of the end, and numbers of tokens, of the prompt and of the answer."""
    async with AsyncOpenAI(base_url=f'{service.url}/v1', api_key='none', timeout=LIVENESS_S) as client:
        answer = await client.chat.completions.create(
            model='demo', messages=messages, max_tokens=64, temperature=0, **options
        )
    assert answer.usage is not None
    (choice,) = answer.choices
    return choice.message.content, choice.finish_reason, (answer.usage.prompt_tokens, answer.usage.completion_tokens)


async def test_it_answers_and_counts_its_tokens(service: Service) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.ensure('small'))
    text, reason, usage = await chat(service, COUNT)
    assert (text, reason) == ('3, 4, 5, 6, 7, 8, 9.', 'stop')
    prompt = tokenizer.apply_chat_template(COUNT, add_generation_prompt=True, tokenize=False)
    # The token that ends the turn is not counted.
    assert usage == (len(tokenizer.encode(prompt)), len(tokenizer.encode(text)))


async def test_a_stop_string_cuts_exactly(service: Service) -> None:
    text, reason, (_, tokens) = await chat(service, COUNT, stop=['6, 7'])
    assert (text, reason) == ('3, 4, 5, ', 'stop')
    assert tokens < (await chat(service, COUNT))[2][1]


async def test_accepted_drafts_are_in_the_metrics(service: Service) -> None:
    await chat(service, COUNT)
    await service.until_idle()
    url = f'http://127.0.0.1:{METRICS_PORT}/metrics'
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        text = await response.text()
    accepted, windows = (
        float(re.search(rf'^replayssm_accepted_drafts_{part}{{.*}} (\S+)$', text, re.MULTILINE)[1])
        for part in ('sum', 'count')
    )
    assert accepted > windows > 0
