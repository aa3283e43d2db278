"""A deployment with two ingress replicas on a Ray of its own, and a Prometheus that scrapes it with our rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from actors.config import AppConfig
from actors.exporter import Exporter
from actors.local import Deployment, wait_until_ready
from actors.metrics import deployment_families
from tests.actors import metric_values
from tests.observability.prometheus import Prometheus, serving
from tests.ports import free_port
from tests.tools import tool

ROOT = Path(__file__).parents[2]
RULES = ROOT / 'deploy/prometheus/rules.yaml'
MODEL = 'demo'
GPU_MODEL = 'gpu-demo'
"""Model of a second exporter, whose numbers are made up: those of GPUs, which this deployment has none of."""
RUNNING = 3
QUEUED = 3
WINDOW = '20s'
"""Range of every rate here, in place of minutes."""


@dataclass(frozen=True, slots=True)
class Service:
    """The deployment: its ingress at `url`, its exporter at `metrics_url`."""

    url: str
    metrics_url: str
    metrics_port: int


def _config(metrics_port: int) -> AppConfig:
    return AppConfig.model_validate(
        {
            'model': {'name': MODEL, 'demo': 'tiny'},
            'engine': {
                'device': 'cpu',
                'dtype': 'float32',
                'session_len': 512,
                'max_batch_size': RUNNING,
                'num_gpu_blocks': 100,
                'block_size': 16,
                'max_prefill_token_num': 256,
                'speculative': {'num_tokens': 3},
            },
            'worker': {'report_period_s': 0.2},
            'router': {'max_queued': QUEUED},
            'api': {'replicas': 2},
            'metrics': {'port': metrics_port},
        }
    )


@pytest.fixture(scope='package')
def service() -> Iterator[Service]:
    """Serve the demo model; ready when the fixture is."""
    tool('prometheus')
    port, metrics_port = free_port(), free_port()
    url = f'http://127.0.0.1:{port}'
    with Deployment(_config(metrics_port), 'test', {'host': '127.0.0.1', 'port': port}):
        wait_until_ready(url)
        yield Service(url, f'http://127.0.0.1:{metrics_port}/metrics', metrics_port)


@pytest.fixture(scope='package')
def gpu_exporter() -> Iterator[int]:
    """Port of the second exporter."""
    stats = replace(metric_values.router(), model_name=GPU_MODEL)
    with Exporter({'deployment': lambda: deployment_families(stats)}, port=0) as exporter:
        yield exporter.port


def shortened(rules: str) -> str:
    """Return rules with windows of seconds, and with alerts that fire at once."""
    return re.sub(r'for: \w+', 'for: 0s', rules.replace('[5m]', f'[{WINDOW}]'))


@pytest.fixture(scope='package')
def prometheus(service: Service, gpu_exporter: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus with the rules, in short windows, that scrapes both exporters."""
    folder = tmp_path_factory.mktemp('prometheus')
    rules = folder / 'rules.yaml'
    rules.write_text(shortened(RULES.read_text()))
    with serving(
        folder, free_port(), rules, {'replayssm': service.metrics_port, 'replayssm-gpu': gpu_exporter}
    ) as running:
        yield running
