"""Serve starts a second worker under load, and stops one without cutting anybody off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI

from actors.config import AppConfig
from actors.messages import RouterStats
from tests.actors.service.conftest import MODEL, Service, openai_client, serving
from tests.actors.service.requests import ask
from tests.patience import LIVENESS_S

"""Serve hears of a demand every ten seconds, and a worker takes a while to load."""
RUNNING = 2

pytestmark = pytest.mark.soak


@pytest.fixture(scope='module')
def service() -> Iterator[Service]:
    """The demo model on one worker or two."""
    config = {
        'model': {'name': MODEL, 'demo': 'tiny'},
        'engine': {'device': 'cpu', 'dtype': 'float32', 'max_batch_size': RUNNING, 'num_gpu_blocks': 64},
        'worker': {
            'report_period_s': 0.2,
            'autoscaling': {
                'max_replicas': 2,
                'target_pressure': 1.0,
                'upscale_delay_s': 0.1,
                'downscale_delay_s': 0.1,
            },
        },
        'metrics': {'port': None},
    }
    with serving(AppConfig.model_validate(config)) as made:
        yield made


def ready(stats: RouterStats) -> int:
    """Return the number of workers that take requests."""
    return sum(worker.state == 'ready' for worker in stats.workers)


async def until_ready(service: Service, count: int) -> None:
    """Wait for a number of workers."""
    while ready(await service.stats()) != count:
        await asyncio.sleep(0.2)


async def keep_asking(client: AsyncOpenAI, name: str) -> None:
    """Ask one request after the other; each has to be answered in full."""
    while True:
        assert (await ask(client, name, 40)).completion_tokens == 40


async def test_one_worker_two_and_one_again(service: Service) -> None:
    async with openai_client(service) as client, asyncio.timeout(LIVENESS_S):
        assert ready(await service.stats()) == 1
        load = [asyncio.create_task(keep_asking(client, f'session {number}')) for number in range(2 * RUNNING)]
        await until_ready(service, 2)
        for task in load[1:]:
            task.cancel()
        # This one goes on through the stop of a worker.
        await until_ready(service, 1)
        assert not load[0].done()
        load[0].cancel()
        await asyncio.wait(load)
        assert (await ask(client, 'after', 4)).completion_tokens == 4
