"""A Ray of one's own on a busy machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray

from actors.ray_start import start_ray


@pytest.fixture
def own_ray() -> Iterator[None]:
    start_ray(num_cpus=1, object_store_memory=80 << 20)
    yield
    ray.shutdown()


@ray.remote
def niceness_and_patience() -> tuple[int, float]:
    from ray.serve._private import constants

    return os.nice(0), constants.PROXY_READY_CHECK_TIMEOUT_S


def test_its_processes_are_not_put_behind_all_others(own_ray: None) -> None:
    niceness, proxy_may_take_s = ray.get(niceness_and_patience.remote())
    assert niceness == os.nice(0)
    assert proxy_may_take_s == 60
