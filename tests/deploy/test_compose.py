"""deploy/docker/compose.yaml and what it mounts go together."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors import serve_file
from tests.deploy.dockerfile import FOLDER, ROOT
from tests.patience import LIVENESS_S
from tests.tools import tool

COMPOSE = yaml.safe_load((FOLDER / 'compose.yaml').read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE['services']
KEYS = {
    'build',
    'cap_drop',
    'command',
    'depends_on',
    'deploy',
    'environment',
    'image',
    'ports',
    'restart',
    'security_opt',
    'shm_size',
    'stop_grace_period',
    'volumes',
}


def mounts(service: str) -> dict[str, str]:
    """Return where each mount comes from, by its path in the container."""
    parts = [volume.removesuffix(':ro').rsplit(':', 1) for volume in SERVICES[service]['volumes']]
    return {target: source for source, target in parts}


def mounted(service: str, target: str) -> Path:
    return (FOLDER / mounts(service)[target]).resolve()


def test_services_have_known_keys_and_pinned_images() -> None:
    assert set(COMPOSE) == {'name', 'services', 'volumes'}
    for name, service in SERVICES.items():
        assert set(service) <= KEYS, name
        tag = service['image'].partition(':')[2]
        assert 'build' in service or tag.count('.') == 2, name


def test_mounts_exist() -> None:
    for service in SERVICES:
        for source in mounts(service).values():
            if source.startswith('.'):
                assert (FOLDER / source).exists(), source
            else:
                assert source.removeprefix('${MODELS:-').removesuffix('}') in COMPOSE['volumes'], source


def test_only_the_host_itself_reaches_the_ports() -> None:
    ports = [port for service in SERVICES.values() for port in service['ports']]
    assert len(ports) == 3
    assert all(port.startswith('127.0.0.1:') for port in ports)


def test_the_service_has_one_gpu_and_shared_memory() -> None:
    (device,) = SERVICES['replayssm']['deploy']['resources']['reservations']['devices']
    assert (device['driver'], device['count'], device['capabilities']) == ('nvidia', 1, ['gpu'])
    assert SERVICES['replayssm']['shm_size'] == '16gb'


def test_the_cpu_variant_changes_services_that_exist() -> None:
    class Loader(yaml.SafeLoader):
        """Knows compose's tag that takes a key out."""

    Loader.add_constructor('!reset', lambda loader, node: None)
    variant = yaml.load((FOLDER / 'compose.cpu.yaml').read_text(), Loader)
    (service,) = variant['services'].values()
    assert set(variant['services']) <= set(SERVICES)
    assert service['deploy'] is None
    assert (ROOT / service['build']['dockerfile']).is_file()


@pytest.mark.parametrize(('inside', 'outside'), [('serve.yaml', 'qwen_tp1.yaml'), ('serve_cpu.yaml', 'local.yaml')])
def test_a_container_serves_the_same_at_another_address(inside: str, outside: str) -> None:
    _, here = serve_file.load(FOLDER / inside)
    _, there = serve_file.load(ROOT / 'deploy' / outside)
    assert here.metrics.host == '0.0.0.0'
    assert here.model_copy(update={'metrics': there.metrics}) == there


def test_prometheus_scrapes_the_exporter() -> None:
    _, config = serve_file.load(mounted('replayssm', '/etc/replayssm/deploy/docker/serve.yaml'))
    path = mounted('prometheus', '/etc/prometheus') / 'prometheus.yml'
    done = subprocess.run(
        [tool('promtool'), 'check', 'config', str(path)],
        capture_output=True,
        text=True,
        timeout=LIVENESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = {job['job_name']: job for job in yaml.safe_load(path.read_text())['scrape_configs']}
    assert jobs['replayssm']['static_configs'] == [{'targets': [f'replayssm:{config.metrics.port}']}]


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    provisioning = mounted('grafana', '/etc/grafana/provisioning')
    (source,) = yaml.safe_load((provisioning / 'datasources/prometheus.yaml').read_text())['datasources']
    assert source['url'] == 'http://prometheus:9090'
    (provider,) = yaml.safe_load((provisioning / 'dashboards/replayssm.yaml').read_text())['providers']
    assert mounted('grafana', provider['options']['path']) == ROOT / 'deploy/grafana/dashboards'
