"""Whatever clients do, every lease, state slot, KV block and Ray object comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import ray
from openai import AsyncOpenAI
from ray._private.internal_api import node_stats

from tests.actors.service.conftest import RUNNING, Service
from tests.actors.service.requests import ask, chat, prompts
from tests.patience import LIVENESS_S

FOREVER = 1900


async def at_most(limit: int, calls: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Run calls, `limit` at a time."""
    gate = asyncio.Semaphore(limit)

    async def run(call: Callable[[], Awaitable[object]]) -> None:
        async with gate:
            await call()

    await asyncio.gather(*(run(call) for call in calls))


async def abort_a_stream(client: AsyncOpenAI, prompt: str) -> None:
    """Read a little of a stream and hang up."""
    stream = await client.chat.completions.create(**chat(prompt, FOREVER), stream=True)
    async for _ in stream:
        break
    await stream.close()


async def test_a_client_that_hangs_up_frees_its_place(client: AsyncOpenAI, service: Service) -> None:
    before = (await service.stats()).finished_total.get('abort', 0)
    await abort_a_stream(client, 'bye')
    stats = await service.until_idle()
    assert stats.finished_total['abort'] == before + 1


async def test_a_client_that_hangs_up_without_streaming(client: AsyncOpenAI, service: Service) -> None:
    before = (await service.stats()).finished_total.get('abort', 0)
    asking = asyncio.create_task(client.chat.completions.create(**chat('bye', FOREVER)))
    await service.until(lambda stats: stats.running == 1)
    asking.cancel()
    stats = await service.until_idle()
    assert stats.finished_total['abort'] == before + 1
    assert (await ask(client, 'still there?', 4)).completion_tokens == 4


async def test_300_aborted_streams(client: AsyncOpenAI, service: Service) -> None:
    expected = await ask(client, 'reference', 40)
    await at_most(RUNNING, [lambda prompt=prompt: abort_a_stream(client, prompt) for prompt in prompts(300)])
    await service.until_idle()
    assert await ask(client, 'reference', 40) == expected


async def test_1000_requests_leave_nothing_behind(client: AsyncOpenAI, service: Service) -> None:
    await at_most(RUNNING, [lambda prompt=prompt: ask(client, prompt, 4) for prompt in prompts(50)])
    await service.until_idle()
    before = ray_objects()
    finished = (await service.stats()).finished_total['length']
    await at_most(RUNNING, [lambda prompt=prompt: ask(client, prompt, 4) for prompt in prompts(1000)])
    stats = await service.until_idle()
    assert stats.finished_total['length'] == finished + 1000
    # Serve's proxy holds a few until its garbage is next collected; a leak of ours would be one per request.
    async with asyncio.timeout(LIVENESS_S):
        while ray_objects() > before + 100:
            await asyncio.sleep(1)


async def test_preempted_requests_say_what_undisturbed_ones_say(client: AsyncOpenAI, service: Service) -> None:
    length = 700
    alone = [await ask(client, prompt, length) for prompt in prompts(RUNNING)]
    before = sum((await service.stats()).workers[0].engine.replay.invalidations.values())
    together = await asyncio.gather(*(ask(client, prompt, length) for prompt in prompts(RUNNING)))
    stats = await service.until_idle()
    assert sum(stats.workers[0].engine.replay.invalidations.values()) > before, 'the cache was meant to be too small'
    assert together == alone


def ray_objects() -> int:
    """Return the number of object references that all processes of this Ray hold."""
    (node,) = [node for node in ray.nodes() if node['Alive']]
    stats = node_stats(node['NodeManagerAddress'], node['NodeManagerPort'])
    return sum(len(process.object_refs) for process in stats.core_workers_stats)
