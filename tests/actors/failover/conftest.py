"""Two workers with prefix checkpoints, for all tests of this package."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI

from actors.config import AppConfig
from tests.actors.service.conftest import MODEL, Service, openai_client, serving

WORKERS = 2
RUNNING = 4


def _config() -> AppConfig:
    return AppConfig.model_validate(
        {
            'model': {'name': MODEL, 'demo': 'tiny'},
            'engine': {
                'device': 'cpu',
                'dtype': 'float32',
                'session_len': 2048,
                'max_batch_size': RUNNING,
                'num_gpu_blocks': 256,
                'block_size': 16,
                'max_prefill_token_num': 256,
                'enable_prefix_caching': True,
                'prefix_cache_state_budget': 16,
                'speculative': {'num_tokens': 3},
            },
            'worker': {'replicas': WORKERS, 'report_period_s': 0.2},
            'router': {'lease_timeout_s': 4.0},
            'metrics': {'port': None},
        }
    )


@pytest.fixture(scope='package')
def service() -> Iterator[Service]:
    """The demo model on two workers."""
    with serving(_config()) as made:
        yield made


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncOpenAI]:
    """A client of the service, which is idle and has both workers ready before and after."""
    await service.until(lambda stats: sum(worker.state == 'ready' for worker in stats.workers) == WORKERS)
    async with openai_client(service) as made:
        yield made
