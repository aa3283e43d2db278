from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from replayssm.api_server import build_parser, replay_config
from replayssm.config import ReplayConfig
from tests.patience import LIVENESS_S
from tests.ports import free_port

SERVER = [sys.executable, '-m', 'replayssm.api_server']
SMALL = ['--device', 'cpu', '--language-model-only', '--session-len', '512', '--num-gpu-blocks', '64']
DRAFTS = ['--speculative-algorithm', 'qwen3_5_mtp', '--speculative-num-draft-tokens', '3']

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope='module')
def parser() -> argparse.ArgumentParser:
    return build_parser()


@pytest.fixture(scope='module')
def url(checkpoint: Checkpoint) -> Iterator[str]:
    """A server of the demo model with ReplaySSM and three drafts."""
    port = free_port()
    address = ['--server-name', '127.0.0.1', '--server-port', str(port), '--model-name', 'demo']
    command = [*SERVER, str(checkpoint('tiny')), *SMALL, *DRAFTS, '--enable-replayssm', *address]
    server = subprocess.Popen(command, start_new_session=True)
    try:
        wait_until_healthy(f'http://127.0.0.1:{port}', server)
        yield f'http://127.0.0.1:{port}'
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f'the server ended with {server.returncode}'
        try:
            urllib.request.urlopen(f'{url}/health', timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f'no answer at {url} within {LIVENESS_S} s')


def test_openai_clients_are_served_with_replay_and_drafts(url: str) -> None:
    client = openai.OpenAI(base_url=f'{url}/v1', api_key='none')
    assert [model.id for model in client.models.list()] == ['demo']
    options = {'model': 'demo', 'prompt': 'hello', 'max_tokens': 64, 'temperature': 0}
    whole = client.completions.create(**options)  # type: ignore[call-overload]
    assert whole.usage.completion_tokens == len(whole.choices[0].text)
    chunks = client.completions.create(**options, stream=True)  # type: ignore[call-overload]
    assert ''.join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text


def test_replay_options_reach_the_engine(checkpoint: Checkpoint) -> None:
    command = [*SERVER, str(checkpoint('tiny')), *SMALL, *DRAFTS, '--enable-replayssm', '--replayssm-buffer-len', '2']
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIVENESS_S, check=False)
    assert result.returncode != 0
    assert 'buffer_len: expected at least 4 (1 token and 3 drafts), got 2' in result.stderr


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        pytest.param('', None, id='off'),
        pytest.param('--enable-replayssm', ReplayConfig(), id='defaults'),
        pytest.param(
            '--enable-replayssm --replayssm-buffer-len 8 --replayssm-checkpoint-dtype bfloat16'
            ' --replayssm-record-dtype bfloat16',
            ReplayConfig(8, 'bfloat16', 'bfloat16'),
            id='all set',
        ),
        pytest.param('--backend turbomind', None, id='stock with the other engine'),
    ],
)
def test_options_become_a_config(parser: argparse.ArgumentParser, options: str, expected: ReplayConfig | None) -> None:
    assert replay_config(parser.parse_args(['model', *options.split()])) == expected


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        pytest.param(
            '--replayssm-buffer-len 8',
            '--replayssm-buffer-len: expected --enable-replayssm beside it',
            id='not enabled',
        ),
        pytest.param('--enable-replayssm --replayssm-buffer-len 0', 'buffer_len: expected 1..32', id='out of range'),
        pytest.param('--enable-replayssm --backend turbomind', '--backend: expected pytorch', id='other engine'),
        pytest.param('--device cpu --backend turbomind', '--backend: expected pytorch', id='other engine on the CPU'),
        pytest.param('--enable-replayssm --device ascend', '--device: expected cuda or cpu', id='other device'),
        pytest.param('--enable-replayssm --dp 2', '--dp: expected 1', id='data parallelism'),
    ],
)
def test_combinations_that_cannot_work_are_refused(parser: argparse.ArgumentParser, options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay_config(parser.parse_args(['model', *options.split()]))


def test_a_refusal_ends_the_command_before_anything_is_loaded() -> None:
    result = subprocess.run(
        [*SERVER, 'model', '--replayssm-buffer-len', '8'],
        capture_output=True,
        text=True,
        timeout=LIVENESS_S,
        check=False,
    )
    assert result.returncode == 2
    assert '--replayssm-buffer-len: expected --enable-replayssm beside it' in result.stderr
