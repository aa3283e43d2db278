"""Processes that die: clients hear of it, nothing is counted twice and no place is lost."""

from __future__ import annotations

import asyncio

import pytest
from openai import APIError, AsyncOpenAI, InternalServerError
from ray import serve

from actors.messages import RouterStats, WorkerReport
from tests.actors.service.conftest import RUNNING, Service, kill
from tests.actors.service.requests import ask, ask_in_pieces, chat
from tests.patience import LIVENESS_S


def generated_tokens(stats: RouterStats) -> float:
    """Return the tokens that the only engine has generated."""
    engine = stats.workers[0].engine
    assert engine is not None
    (family,) = [family for family in engine.lmdeploy if family.name == 'lmdeploy_generation_tokens']
    return sum(sample.value for sample in family.samples if sample.name.endswith('_total'))


async def test_a_killed_worker_that_nobody_can_stand_in_for(client: AsyncOpenAI, service: Service) -> None:
    before = await ask(client, 'before', 20)
    (old,) = (await service.stats()).workers
    stream = await client.chat.completions.create(**chat('dies', 1900), stream=True)
    whole = asyncio.create_task(client.chat.completions.create(**chat('dies', 1900)))
    await service.until(lambda stats: stats.running == 2)
    kill('Worker')

    with pytest.raises(APIError, match='No worker'):
        async for _ in stream:
            pass
    with pytest.raises(InternalServerError) as caught:
        await whole
    assert caught.value.status_code == 503

    refusals = []
    async with asyncio.timeout(LIVENESS_S):
        while True:
            try:
                after = await ask(client, 'before', 20)
                break
            except InternalServerError as error:
                refusals.append(error)
                await asyncio.sleep(0.5)
    assert after == before
    assert refusals, 'no worker takes less than half a second to load'
    assert {error.status_code for error in refusals} == {503}
    assert all(int(error.response.headers['retry-after']) >= 1 for error in refusals)
    assert any('loading' in str(error) for error in refusals)
    (new,) = (await service.until_idle()).workers
    assert new.worker_id != old.worker_id


async def test_a_worker_that_serve_does_not_know_any_more(client: AsyncOpenAI, service: Service) -> None:
    expected = await ask(client, 'elsewhere', 20)
    await service.until_idle()
    ghost = WorkerReport('ghost', 'ready', capacity=100)
    await serve.get_deployment_handle('Router', 'test').report.remote(ghost)
    assert await ask(client, 'elsewhere', 20) == expected
    stats = await service.until_idle()
    assert 'ghost' not in {worker.worker_id for worker in stats.workers}


async def test_a_killed_router(client: AsyncOpenAI, service: Service) -> None:
    expected = await ask(client, 'goes on', 300)
    await service.until_idle()
    running = asyncio.create_task(ask_in_pieces(client, 'goes on', 300))
    await service.until(lambda stats: stats.running == 1)
    kill('Router')
    waiting = asyncio.create_task(ask(client, 'new', 4))
    answer, _ = await running
    assert answer == expected
    assert (await waiting).completion_tokens == 4


async def test_a_killed_router_learns_of_leases(client: AsyncOpenAI, service: Service) -> None:
    streams = [
        await client.chat.completions.create(**chat(f'runs {number}', 1900), stream=True) for number in range(RUNNING)
    ]
    kill('Router')
    await service.until(lambda stats: stats.running == RUNNING)
    for stream in streams:
        await stream.close()


async def test_a_killed_ingress(client: AsyncOpenAI, service: Service) -> None:
    before = generated_tokens(await service.stats())
    streams = [
        await client.chat.completions.create(**chat(f'cut {number}', 1900), stream=True) for number in range(RUNNING)
    ]
    await service.until(lambda stats: stats.running == RUNNING)
    kill('Api')
    for stream in streams:
        with pytest.raises(APIError):
            async for _ in stream:
                pass
    after = generated_tokens(await service.until_idle())
    assert after - before < RUNNING * 1900, 'nobody reads these tokens any more'
    async with asyncio.timeout(LIVENESS_S):
        while True:
            try:
                assert (await ask(client, 'again', 4)).completion_tokens == 4
                break
            except APIError:
                await asyncio.sleep(0.5)
