"""LMDeploy's Ray executor and the inputs it puts into Ray's object store, with a real worker of its own."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from lmdeploy.pytorch.engine.executor import ray_executor
from lmdeploy.pytorch.engine.executor.ray_executor import RayExecutor

from actors.ray_start import start_ray
from replayssm.patch import ray_free
from tests.patch.scheduling import STOCK_AND_FIXED, installed
from tests.patience import LIVENESS_S

NUM_FORWARDS = 4


class Worker:
    """The part of a rank that the executor talks to here."""

    def forward_async(self, inputs: dict[str, Any]) -> None:
        if inputs.get('fail'):
            raise ValueError('the forward failed')


@pytest.fixture(scope='module')
def workers() -> Iterator[list[Any]]:
    start_ray(num_cpus=1, object_store_memory=80 << 20)
    yield [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)]
    ray.shutdown()


@pytest.fixture
def executor(workers: list[Any]) -> RayExecutor:
    """An executor as it stands before its first forward."""
    executor = RayExecutor.__new__(RayExecutor)
    executor.workers = workers
    executor.dag = None
    executor._connector_steps = deque()
    return executor


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(ray_executor.logger, 'warning', messages.append)
    return messages


@pytest.fixture
def put_refs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hex ids of all objects put; an id does not keep its object."""
    ids: list[str] = []
    put = ray.put

    def record(value: Any) -> Any:
        ref = put(value)
        ids.append(ref.hex())
        return ref

    monkeypatch.setattr(ray, 'put', record)
    return ids


async def alive(ids: list[str], expected: list[str]) -> list[str]:
    """Return those of `ids` that Ray still keeps, as soon as they are `expected` or when patience ends."""
    deadline = time.monotonic() + LIVENESS_S
    while True:
        counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
        kept = [hex_id for hex_id in ids if hex_id.encode() in counts]
        if kept == expected or time.monotonic() > deadline:
            return kept
        await asyncio.sleep(0.05)


@STOCK_AND_FIXED
async def test_inputs_are_freed_when_the_workers_have_read_them(
    executor: RayExecutor, warnings: list[str], put_refs: list[str], fixed: bool
) -> None:
    with installed(ray_free, when=fixed):
        for step in range(NUM_FORWARDS):
            await executor.forward_async({'tokens': np.full(1 << 18, step)})
        ray.get(executor._prev_out)
    assert len(put_refs) == NUM_FORWARDS
    assert len(executor._connector_steps) == NUM_FORWARDS
    kept = [] if fixed else put_refs[-1:]
    assert await alive(put_refs, kept) == kept
    if fixed:
        assert not warnings
    else:
        assert len(warnings) == NUM_FORWARDS - 1
        assert all("has no attribute 'free'" in message for message in warnings)


@STOCK_AND_FIXED
async def test_a_failed_forward_is_reported_by_the_next(executor: RayExecutor, fixed: bool) -> None:
    with installed(ray_free, when=fixed):
        await executor.forward_async({'fail': True})
        for _ in range(2):
            with pytest.raises(ValueError, match='the forward failed'):
                await executor.forward_async({})


@STOCK_AND_FIXED
async def test_a_dead_worker_is_reported(executor: RayExecutor, fixed: bool) -> None:
    executor.workers = [ray.remote(Worker).options(num_cpus=0).remote()]
    with installed(ray_free, when=fixed):
        await executor.forward_async({})
        ray.get(executor._prev_out)
        ray.kill(executor.workers[0])
        await executor.forward_async({})
        with pytest.raises(ray.exceptions.RayActorError):
            await executor.forward_async({})
