"""`python -m actors.local`: what it tells Ray, and how it says no."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from actors import serve_file as serve_file_module
from actors.config import AppConfig
from actors.local import count_gpus, open_door, ray_resources
from replayssm.config import CPU_RANK_RESOURCE
from tests.patience import LIVENESS_S

DEPLOY_DIR = Path(__file__).parents[2] / 'deploy'
SERVE_FILES = sorted(path for path in DEPLOY_DIR.rglob('*.yaml') if 'import_path:' in path.read_text())
CPU = {'device': 'cpu', 'num_gpu_blocks': 64}


@pytest.mark.parametrize(
    ('engine', 'worker', 'cpus', 'ranks'),
    [
        pytest.param({**CPU}, {}, 3, 0, id='one-process'),
        pytest.param({**CPU, 'tp': 4}, {}, 3, 4, id='four-ranks'),
        pytest.param({**CPU, 'tp': 2}, {'replicas': 3}, 5, 6, id='three-pairs'),
        pytest.param({'tp': 4}, {}, 3, 0, id='gpus-count-themselves'),
        pytest.param({**CPU}, {'autoscaling': {'max_replicas': 6}}, 8, 0, id='room-to-grow'),
    ],
)
def test_the_application_fits_a_small_machine(
    engine: dict[str, object], worker: dict[str, object], cpus: int, ranks: int
) -> None:
    config = AppConfig.model_validate({'model': {'name': 'x', 'demo': 'tiny'}, 'engine': engine, 'worker': worker})
    made = ray_resources(config, cpus=2)
    assert made == {'num_cpus': cpus, 'resources': {CPU_RANK_RESOURCE: ranks} if ranks else {}}


@pytest.mark.parametrize(
    ('host', 'keys', 'warns'),
    [
        pytest.param('127.0.0.1', None, False, id='loopback'),
        pytest.param('localhost', None, False, id='localhost'),
        pytest.param('::1', None, False, id='loopback-6'),
        pytest.param('0.0.0.0', None, True, id='all'),
        pytest.param('::', None, True, id='all-6'),
        pytest.param('gpu7.example', None, True, id='name'),
        pytest.param('0.0.0.0', '/etc/keys', False, id='keys'),
    ],
)
def test_an_open_door_is_pointed_out(host: str, keys: str | None, warns: bool) -> None:
    config = AppConfig.model_validate({'model': {'name': 'x', 'demo': 'tiny'}, 'api': {'api_keys_file': keys}})
    assert ('set api.api_keys_file' in open_door(host, config)) == warns


def serve_file(path: Path, overrides: tuple[dict[str, object], ...] = (), **application: object) -> Path:
    """Write a config file whose HTTP port is free."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        port = listener.getsockname()[1]
    args = {'model': {'name': 'x', 'path': '/none'}, **application}
    applications = [{'name': 'x', 'import_path': 'actors.app:build_app', 'args': args, 'deployments': list(overrides)}]
    path.write_text(yaml.safe_dump({'http_options': {'port': port}, 'applications': applications}))
    return path


def refuse(path: Path) -> str:
    """Return everything that is said of a file that cannot be served."""
    done = subprocess.run(
        [sys.executable, '-m', 'actors.local', str(path)],
        capture_output=True,
        text=True,
        timeout=LIVENESS_S,
        check=False,
    )
    assert done.returncode == 2
    assert 'Traceback' not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ('engine', 'message'),
    [
        pytest.param({'tp': 1000}, 'need 1 CPU + 1000 GPU each on one node, and only 0 fit', id='no-gpus'),
        pytest.param({'tpp': 4}, "engine.tpp: unknown key; did you mean 'tp'?", id='misspelt'),
    ],
)
def test_what_cannot_work_ends_with_a_reason(engine: dict[str, object], message: str, tmp_path: Path) -> None:
    assert message in refuse(serve_file(tmp_path / 'serve.yaml', engine=engine))


@pytest.mark.parametrize(
    ('name', 'gpus', 'local'),
    [
        pytest.param('qwen_tp1.yaml', 1, 'local.yaml', id='qwen'),
        pytest.param('glm_tp4.yaml', 4, 'local_glm_tp4.yaml', id='glm'),
        pytest.param('docker/serve.yaml', 1, 'local.yaml', id='docker'),
    ],
)
def test_a_file_for_gpus_is_refused_before_anything_starts(name: str, gpus: int, local: str, tmp_path: Path) -> None:
    if count_gpus() >= gpus:
        pytest.skip(f'a machine with {gpus} GPUs starts this file; that it refuses needs one with fewer')
    data = yaml.safe_load((DEPLOY_DIR / name).read_text())
    said = refuse(serve_file(tmp_path / 'serve.yaml', **data['applications'][0]['args']))
    assert f'need 1 CPU + {gpus} GPU each on one node, and only 0 fit' in said
    assert f'deploy/{local} needs none' in said
    assert (DEPLOY_DIR / local).exists()
    assert 'Starting Ray' not in said


def test_every_file_for_gpus_is_refused_in_a_test_above() -> None:
    names = {str(path.relative_to(DEPLOY_DIR)) for path in SERVE_FILES if 'device: cuda' in path.read_text()}
    assert names == {'qwen_tp1.yaml', 'glm_tp4.yaml', 'docker/serve.yaml'}


@pytest.mark.parametrize('path', SERVE_FILES, ids=lambda path: str(path.relative_to(DEPLOY_DIR)))
def test_every_file_in_deploy_can_be_served(path: Path) -> None:
    schema, config = serve_file_module.load(path)
    listens_at = {schema.http_options.host, config.metrics.host}
    # A container has an address of its own, which nobody but the host reaches.
    assert listens_at == {'0.0.0.0' if path.parent.name == 'docker' else '127.0.0.1'}


@pytest.mark.parametrize(
    ('name', 'device', 'tp', 'method'),
    [
        pytest.param('qwen_tp1.yaml', 'cuda', 1, 'qwen3_5_mtp', id='qwen'),
        pytest.param('glm_tp4.yaml', 'cuda', 4, 'deepseek_mtp', id='glm'),
        pytest.param('local_glm_tp4.yaml', 'cpu', 4, 'deepseek_mtp', id='glm-on-the-cpu'),
    ],
)
def test_files_of_released_models_have_drafts_and_replay(name: str, device: str, tp: int, method: str) -> None:
    _, config = serve_file_module.load(DEPLOY_DIR / name)
    assert (config.engine.device, config.engine.tp) == (device, tp)
    assert config.engine.replay.enabled
    assert config.engine.speculative is not None
    assert (config.engine.speculative.method, config.engine.speculative.num_tokens) == (method, 3)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    path = serve_file(tmp_path / 'serve.yaml')
    port = yaml.safe_load(path.read_text())['http_options']['port']
    with socket.create_server(('127.0.0.1', port)):
        assert f'http_options.port: got {port}; Address already in use' in refuse(path)


@pytest.mark.parametrize('key', ['api_keys_file', 'admin_token_file'])
def test_a_file_of_tokens_that_is_missing(tmp_path: Path, key: str) -> None:
    path = serve_file(tmp_path / 'serve.yaml', api={key: '/none/tokens'}, engine=CPU)
    assert f"api.{key}: got '/none/tokens'; No such file or directory" in refuse(path)


def test_overrides_are_not_dropped_in_silence(tmp_path: Path) -> None:
    path = serve_file(tmp_path / 'serve.yaml', overrides=({'name': 'Worker', 'num_replicas': 2},))
    assert 'deployments: overrides need a cluster of their own; use `serve run' in refuse(path)


def test_a_model_that_cannot_load_ends_the_wait_with_its_reason(tmp_path: Path) -> None:
    model, engine = {'name': 'x', 'demo': 'odd'}, {**CPU, 'tp': 4}
    said = refuse(serve_file(tmp_path / 'serve.yaml', model=model, engine=engine, metrics={'port': None}))
    assert 'The model is unavailable.' in said
    assert 'tp: expected a divisor of linear_num_key_heads=2, got 4' in said


def listening_at(port: int) -> set[str]:
    """Return the addresses at which somebody listens on a port."""
    sockets = psutil.net_connections('tcp')
    return {found.laddr.ip for found in sockets if found.status == psutil.CONN_LISTEN and found.laddr.port == port}


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_told_to_stop_it_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    model, engine = {'name': 'x', 'demo': 'tiny'}, {**CPU, 'dtype': 'float32'}
    path = serve_file(tmp_path / 'serve.yaml', model=model, engine=engine, metrics={'port': None})
    command = [sys.executable, '-m', 'actors.local', str(path)]
    # As a shell starts a background job.
    ignoring = ['sh', '-c', 'trap "" INT; exec "$@"', 'sh', *command]
    with subprocess.Popen(ignoring, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any('Ready at http://127.0.0.1:' in line for line in process.stdout)
        assert listening_at(yaml.safe_load(path.read_text())['http_options']['port']) == {'127.0.0.1'}
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(timeout=LIVENESS_S) == 0
    _, alive = psutil.wait_procs(started, timeout=LIVENESS_S)
    assert not alive
