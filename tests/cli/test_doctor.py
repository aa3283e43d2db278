from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from replayssm.doctor import Check, Need, Report, examine
from tests.patience import LIVENESS_S


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, '-m', 'replayssm.cli', 'doctor', *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIVENESS_S, check=False)


def missing(*needed_for: Need) -> Check:
    return Check('part', 'missing', 'not there', 'get it', needed_for)


def finding(report: Report, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(('127.0.0.1', 0)) as server:
        yield server


def test_json_report_of_this_machine() -> None:
    result = run('--json')
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report['modes']['cpu'] is True
    checks = {check['name']: check for check in report['checks']}
    assert checks['lmdeploy']['detail'] == '0.18.0, supported: ==0.18.0'
    assert {'torch', 'triton', 'transformers', 'ray', 'NVML', 'port 8000', 'port 9401', 'Ray cluster'} <= checks.keys()


def test_whatever_is_missing_has_a_remedy() -> None:
    for check in examine().checks:
        assert check.status == 'ok' or check.remedy, check


def test_table_names_every_mode() -> None:
    result = run()
    assert result.returncode == 0, result.stderr
    assert 'yes engine on the CPU' in result.stdout


@pytest.mark.parametrize(
    ('checks', 'working'),
    [
        pytest.param((), {'cpu', 'gpu', 'deployment'}, id='nothing missing'),
        pytest.param((missing('gpu'),), {'cpu', 'deployment'}, id='no GPU'),
        pytest.param((missing('cpu'), missing('gpu')), set(), id='no engine, so no deployment'),
        pytest.param((missing('deployment'),), {'cpu', 'gpu'}, id='no Ray'),
        pytest.param((Check('part', 'note', 'odd'),), {'cpu', 'gpu', 'deployment'}, id='a note'),
    ],
)
def test_modes_follow_from_what_is_missing(checks: tuple[Check, ...], working: set[Need]) -> None:
    report = Report(checks)
    assert {mode for mode, works in report.modes.items() if works} == working
    assert report.can_run == bool(working & {'cpu', 'gpu'})


def test_a_cluster_that_answers_is_found(monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    address = f'127.0.0.1:{listener.getsockname()[1]}'
    monkeypatch.setenv('RAY_ADDRESS', f'ray://{address}')
    assert finding(examine(), 'Ray cluster').status == 'ok'


@pytest.mark.parametrize('address', ['127.0.0.1:1', 'nonsense'], ids=['nobody listens', 'no port'])
def test_a_cluster_that_does_not_answer_is_noted(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv('RAY_ADDRESS', address)
    check = finding(examine(), 'Ray cluster')
    assert check.status == 'note'
    assert address in check.detail
    assert 'ray start' in check.remedy


def test_a_port_in_use_is_noted_with_its_option(monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    monkeypatch.setattr('replayssm.doctor._PORTS', {port: 'metrics.port'})
    check = finding(examine(), f'port {port}')
    assert (check.status, check.remedy) == ('note', 'free it, or set metrics.port')
