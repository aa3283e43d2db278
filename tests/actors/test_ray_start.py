"""A Ray of one's own, and Serve on it, on a busy machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray
from ray.serve._private import api

from actors.config import AppConfig
from actors.ray_start import start_ray
from tests.actors.service.conftest import serving


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


def test_a_proxy_may_take_longer_than_serve_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serving` begins when the proxy passes on that the model is loaded."""
    monkeypatch.setattr(api, 'HTTP_PROXY_TIMEOUT', 0.001)
    engine = {'device': 'cpu', 'num_gpu_blocks': 64}
    config = {'model': {'name': 'x', 'demo': 'tiny'}, 'engine': engine, 'metrics': {'port': None}}
    with serving(AppConfig.model_validate(config)) as service:
        assert service.url.startswith('http://127.0.0.1:')
