"""Tensor-parallel workers: a rank dies, the controller dies, and everything comes back once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest
import ray
from openai import AsyncOpenAI

from actors.config import AppConfig
from actors.messages import RouterStats
from tests.actors.failover.test_failover import is_reported
from tests.actors.service.conftest import MODEL, Service, kill, openai_client, serving
from tests.actors.service.requests import ask, ask_in_pieces
from tests.chaos.__main__ import placement_groups
from tests.chaos.faults import kill_rank
from tests.patience import LIVENESS_S

pytestmark = pytest.mark.soak

LENGTH = 200


@pytest.fixture(scope='module')
def ranks() -> Iterator[Service]:
    """One worker of two ranks."""
    config = {
        'model': {'name': MODEL, 'demo': 'tp4'},
        'engine': {
            'device': 'cpu',
            'tp': 2,
            'dtype': 'float32',
            'session_len': 1024,
            'max_batch_size': 2,
            'num_gpu_blocks': 128,
            'block_size': 16,
            'max_prefill_token_num': 256,
            'speculative': {'num_tokens': 3},
        },
        'worker': {'report_period_s': 0.2, 'health_check_period_s': 1.0},
        'router': {'lease_timeout_s': 4.0, 'resume_wait_s': LIVENESS_S, 'max_resumes': 10},
        'metrics': {'port': None},
    }
    with serving(AppConfig.model_validate(config)) as made:
        yield made


async def test_a_killed_rank(ranks: Service) -> None:
    async with openai_client(ranks) as client:
        await _survives(ranks, client.with_options(timeout=LIVENESS_S), lambda: kill_rank(random.Random(0)))


async def test_a_killed_controller_and_worker(ranks: Service) -> None:
    def kill_both() -> bool:
        ray.kill(ray.get_actor('SERVE_CONTROLLER_ACTOR', 'serve'), no_restart=False)
        kill('Worker')
        return True

    async with openai_client(ranks) as client:
        await _survives(ranks, client.with_options(timeout=LIVENESS_S), kill_both)


async def _survives(service: Service, client: AsyncOpenAI, fault: Callable[[], bool]) -> None:
    """Check that an answer survives a fault, that a new worker follows, and that nothing is left over."""
    expected = await ask(client, 'goes on', LENGTH)
    before = await service.until_idle()
    groups = placement_groups()
    running = asyncio.create_task(ask_in_pieces(client, 'goes on', LENGTH))
    await service.until(is_reported)
    assert not running.done()
    assert fault()
    answer, _ = await running
    assert answer == expected
    old = before.workers[0].worker_id

    def has_recovered(stats: RouterStats) -> bool:
        return [worker.state for worker in stats.workers] == ['ready'] and stats.workers[0].worker_id != old

    await service.until(has_recovered)
    async with asyncio.timeout(LIVENESS_S):
        while placement_groups() != groups:
            await asyncio.sleep(0.5)
