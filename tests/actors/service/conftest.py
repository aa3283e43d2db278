"""One deployment on a Ray of its own, for all tests of this package."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import ray
from openai import AsyncOpenAI
from ray import serve
from ray.exceptions import RayActorError
from ray.util import list_named_actors

from actors.config import AppConfig
from actors.local import Deployment, wait_until_ready
from actors.messages import RouterStats
from tests.patience import LIVENESS_S
from tests.ports import free_port

MODEL = 'demo'
ADMIN_TOKEN = 'token-of-the-tests'
RUNNING = 4
QUEUED = 4


@dataclass(frozen=True, slots=True)
class Service:
    """A deployment under test, at `url`; `keeps_prefixes`: whether its KV blocks may outlive their requests."""

    url: str
    keeps_prefixes: bool = False

    async def stats(self) -> RouterStats:
        """Return the router's numbers."""
        stats: RouterStats = await serve.get_deployment_handle('Router', 'test').stats.remote()
        return stats

    async def until(self, condition: Callable[[RouterStats], bool]) -> RouterStats:
        """Wait until the router's numbers meet a condition; a router that is away comes back."""
        stats = None
        try:
            async with asyncio.timeout(LIVENESS_S):
                while True:
                    with contextlib.suppress(RayActorError):
                        stats = await self.stats()
                        if condition(stats):
                            return stats
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise TimeoutError(f'still, after {LIVENESS_S:g} s: {stats}') from None

    async def until_idle(self) -> RouterStats:
        """Wait until nothing runs or waits, neither in the router nor in the engine, and the numbers say so.

        A request can begin and end between two reports, so the second report from now counts.
        """
        reported = {worker.worker_id: worker.number for worker in (await self.until(self.is_idle)).workers}

        def is_settled(stats: RouterStats) -> bool:
            return self.is_idle(stats) and all(
                worker.number >= reported.get(worker.worker_id, -2) + 2 for worker in stats.workers
            )

        return await self.until(is_settled)

    def is_idle(self, stats: RouterStats) -> bool:
        """Tell whether no request holds anything."""
        engines = [worker.engine for worker in stats.workers]
        return stats.running + stats.queued == 0 and all(
            engine is not None
            and engine.running + engine.waiting == 0
            and engine.replay.state_slots_used == engine.replay.checkpoint_slots
            and engine.replay.kv_blocks_used == 0
            # LMDeploy keeps one block for padding.
            and (self.keeps_prefixes or engine.replay.kv_blocks_free >= engine.replay.kv_blocks - 1)
            for engine in engines
        )


def kill(deployment: str, replica: str = '') -> None:
    """Kill the process of a deployment's replica: of its only one, or of the one with this id."""
    mark = f'#{deployment}#{replica}'
    (name,) = [actor['name'] for actor in list_named_actors(all_namespaces=True) if mark in actor['name']]
    ray.kill(ray.get_actor(name, 'serve'))


def _config(admin_token_file: Path) -> AppConfig:
    return AppConfig.model_validate(
        {
            'model': {'name': MODEL, 'demo': 'tiny'},
            'engine': {
                'device': 'cpu',
                'dtype': 'float32',
                'session_len': 2048,
                'max_batch_size': RUNNING,
                'num_gpu_blocks': 136,
                'block_size': 16,
                'max_prefill_token_num': 256,
                'speculative': {'num_tokens': 3},
            },
            'worker': {'report_period_s': 0.2},
            'router': {'max_queued': QUEUED, 'lease_timeout_s': 4.0, 'max_kv_share': 2.0, 'resume_wait_s': 0.0},
            'api': {'admin_token_file': str(admin_token_file)},
            'metrics': {'port': None},
        }
    )


@contextlib.contextmanager
def serving(config: AppConfig) -> Iterator[Service]:
    """Serve on a Ray of its own; ready when the context is."""
    port = free_port()
    url = f'http://127.0.0.1:{port}'
    with Deployment(config, 'test', {'host': '127.0.0.1', 'port': port}):
        wait_until_ready(url)
        yield Service(url, config.engine.enable_prefix_caching)


@contextlib.asynccontextmanager
async def openai_client(service: Service) -> AsyncIterator[AsyncOpenAI]:
    """Yield an OpenAI client that never tries again by itself; the service is idle before and after."""
    await service.until_idle()
    async with AsyncOpenAI(base_url=f'{service.url}/v1', api_key='none', max_retries=0, timeout=LIVENESS_S) as made:
        yield made
    await service.until_idle()


@pytest.fixture(scope='package')
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The demo model on one worker."""
    token_file = tmp_path_factory.mktemp('service') / 'admin'
    token_file.write_text(ADMIN_TOKEN)
    with serving(_config(token_file)) as made:
        yield made


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncOpenAI]:
    """A client of the service, which is idle before and after."""
    async with openai_client(service) as made:
        yield made


@pytest.fixture
async def http(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    """A plain HTTP client of the service."""
    async with aiohttp.ClientSession(service.url, timeout=aiohttp.ClientTimeout(LIVENESS_S)) as made:
        yield made
