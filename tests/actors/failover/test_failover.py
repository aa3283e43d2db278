"""A worker dies in the middle of answers: another one goes on, and the client does not notice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, AsyncStream
from openai.types.chat import ChatCompletionChunk

from actors.messages import RouterStats
from tests.actors.service.conftest import Service, kill
from tests.actors.service.requests import Answer, ask, ask_in_pieces, chat

LENGTH = 600


def busy_worker(stats: RouterStats) -> str:
    """Return the worker that runs the only request."""
    (lease,) = [lease for worker in stats.workers for lease in worker.running]
    return lease.worker_id


def is_reported(stats: RouterStats) -> bool:
    return stats.running == 1 and sum(len(worker.running) for worker in stats.workers) == 1


async def kill_under(service: Service, running: asyncio.Task[Any]) -> str:
    """Kill the worker of the only request once it has begun; return the worker."""
    worker = busy_worker(await service.until(is_reported))
    kill('Worker', worker)
    assert not running.done(), 'it was meant to be in the middle of its answer'
    return worker


OPTIONS: list[Any] = [
    pytest.param({}, id='greedy'),
    pytest.param({'logprobs': True, 'top_logprobs': 2}, id='logprobs'),
]


@pytest.mark.parametrize('options', OPTIONS)
async def test_a_stream_goes_on_elsewhere(client: AsyncOpenAI, service: Service, options: dict[str, Any]) -> None:
    expected = await ask(client, 'goes on', LENGTH, **options)
    before = await service.until_idle()
    running = asyncio.create_task(ask_in_pieces(client, 'goes on', LENGTH, **options))
    await kill_under(service, running)
    answer, _ = await running
    assert answer == expected, 'no token twice, none missing, limits and usage counted from the start'
    after = await service.until_idle()
    assert after.resumed_total.get('worker_died', 0) == before.resumed_total.get('worker_died', 0) + 1
    assert after.finished_total['length'] == before.finished_total['length'] + 1


async def test_a_sampled_stream_goes_on_elsewhere(client: AsyncOpenAI, service: Service) -> None:
    options = {'temperature': 0.9, 'seed': 7}
    running = asyncio.create_task(ask_in_pieces(client, 'samples', LENGTH, **options))
    await kill_under(service, running)
    answer, _ = await running
    # Which tokens come depends on how the windows of drafts fall; without drafts see test_resume.
    assert (answer.finish_reason, answer.completion_tokens) == ('length', LENGTH)


async def test_a_whole_answer_goes_on_elsewhere(client: AsyncOpenAI, service: Service) -> None:
    expected = await ask(client, 'whole', LENGTH)
    await service.until_idle()
    running = asyncio.create_task(ask(client, 'whole', LENGTH))
    await kill_under(service, running)
    assert await running == expected


async def test_stop_strings_are_found_across_workers(client: AsyncOpenAI, service: Service) -> None:
    whole = await ask(client, 'stops', LENGTH)
    stop = whole.text[-40:]
    assert whole.text.find(stop) == len(whole.text) - 40
    expected = await ask(client, 'stops', LENGTH, stop=[stop])
    assert expected.finish_reason == 'stop'
    await service.until_idle()
    running = asyncio.create_task(ask_in_pieces(client, 'stops', LENGTH, stop=[stop]))
    await kill_under(service, running)
    answer, _ = await running
    assert answer == expected


async def test_a_guided_answer_cannot_go_on_elsewhere(client: AsyncOpenAI, service: Service) -> None:
    shape = {'type': 'json_schema', 'json_schema': {'name': 'letters', 'schema': {'type': 'string', 'minLength': 1500}}}
    stream: AsyncStream[ChatCompletionChunk] = await client.chat.completions.create(
        **chat('guided', LENGTH, response_format=shape), stream=True
    )
    kill('Worker', busy_worker(await service.until(is_reported)))
    with pytest.raises(APIError, match='response_format cannot go on elsewhere'):
        async for _ in stream:
            pass
    stats = await service.until_idle()
    assert stats.finished_total['error'] >= 1


async def test_sessions_of_a_lost_worker_find_a_new_home(client: AsyncOpenAI, service: Service) -> None:
    before = (await service.until_idle()).sessions

    async def turn(name: str) -> Answer:
        return await ask(client, f'I am {name}. ' + 'Tell me more. ' * 20, 30, user=name)

    names = [f'session {number}' for number in range(6)]
    first = [await turn(name) for name in names]
    stats = await service.until_idle()
    resident = stats.sessions.by_state['resident']
    assert resident >= len(names)
    homes = [worker.worker_id for worker in stats.workers]
    kill('Worker', homes[0])
    assert [await turn(name) for name in names] == first, 'the same prompts, so the same answers'
    after = (await service.until_idle()).sessions
    lost = after.invalidations_total.get('replica_lost', 0) - before.invalidations_total.get('replica_lost', 0)
    assert 0 < lost <= resident
    assert after.by_state['resident'] >= len(names)
