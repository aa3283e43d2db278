"""The thread around the engine: loading, failing and blocking never take the caller along."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actors.config import EngineConfig, ModelConfig
from actors.engine import ChangeRefused, EngineUnhealthy, TokenEngine
from actors.messages import GenerateRequest, Lease
from replayssm import demo
from tests.patience import LIVENESS_S


class IdleEngine:
    """An engine whose loop runs and that is never asked to generate."""

    max_session_len = 128
    executor = None

    def __init__(self, health: Callable[[], dict[str, Any]]) -> None:
        self.model_path = str(demo.ensure('tiny'))
        self.get_local_health_status = health
        self._stopped = asyncio.Event()

    def start(self) -> None:
        pass

    def close(self) -> None:
        self._stopped.set()

    async def wait_tasks(self) -> None:
        await self._stopped.wait()


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """An event that lets everything go on at the end."""
    event = threading.Event()
    yield event
    event.set()


def engine(build: Callable[[ModelConfig, EngineConfig], Any]) -> TokenEngine:
    made = TokenEngine(ModelConfig(name='x', demo='tiny'), EngineConfig(), stall_timeout_s=60.0, build=build)
    made.start()
    return made


async def until(made: TokenEngine, state: str) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while made.state != state:
            await asyncio.sleep(0.01)


async def generate(made: TokenEngine) -> None:
    async for _ in made.generate(GenerateRequest(Lease('r', 'w', 'api', 's'), [1], None)):
        pass


async def test_a_slow_load_is_healthy_and_says_so(released: threading.Event) -> None:
    made = engine(lambda *_: released.wait())
    await made.check(timeout_s=0.01)
    assert made.state == 'loading'
    assert await made.stats() is None
    with pytest.raises(EngineUnhealthy, match='the engine is loading'):
        await generate(made)


async def test_a_failed_load_is_unhealthy_and_says_why() -> None:
    def fail(*_: object) -> None:
        raise ValueError('no such checkpoint')

    made = engine(fail)
    await until(made, 'failed')
    with pytest.raises(EngineUnhealthy, match='ValueError: no such checkpoint'):
        await made.check(timeout_s=1.0)
    with pytest.raises(EngineUnhealthy, match='no such checkpoint'):
        await generate(made)


async def test_a_blocked_loop_is_noticed(released: threading.Event) -> None:
    def block() -> dict[str, Any]:
        released.wait()
        return {'alive': True, 'message': '', 'schedule_metrics': None}

    made = engine(lambda *_: IdleEngine(block))
    await until(made, 'ready')
    started_s = time.monotonic()
    with pytest.raises(EngineUnhealthy, match=r'has not answered for 0\.2 s'):
        await made.check(timeout_s=0.2)
    assert time.monotonic() - started_s < LIVENESS_S


async def test_a_dead_engine_loop_is_noticed() -> None:
    made = engine(
        lambda *_: IdleEngine(lambda: {'alive': False, 'message': 'the loop is gone', 'schedule_metrics': None})
    )
    await until(made, 'ready')
    with pytest.raises(EngineUnhealthy, match='the loop is gone'):
        await made.check(timeout_s=5.0)
    await asyncio.to_thread(made.close, LIVENESS_S)
    assert made.state == 'failed'


async def test_random_weights_cannot_be_read_again() -> None:
    model = ModelConfig(name='x', path='/none', random_weights=True)
    made = TokenEngine(model, EngineConfig(device='cpu', num_gpu_blocks=1), stall_timeout_s=1.0)
    with pytest.raises(ChangeRefused, match=r'model\.random_weights is true'):
        await made.reload()
