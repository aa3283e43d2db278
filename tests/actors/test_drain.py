"""A stop under load: what was accepted is answered in full, later requests meet a closed door, nobody gets a 5xx."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import ray
import yaml

from actors.config import AppConfig
from tests.actors.service.conftest import serving
from tests.actors.test_local import CPU, serve_file
from tests.patience import LIVENESS_S

CLIENTS = 6


def body(max_tokens: int, stream: bool) -> dict[str, Any]:
    return {
        'model': 'x',
        'messages': [{'role': 'user', 'content': 'Hello'}],
        'max_tokens': max_tokens,
        'ignore_eos': True,
        'stream': stream,
    }


async def fate(http: aiohttp.ClientSession, max_tokens: int, stream: bool, begun: asyncio.Event | None = None) -> str:
    """Return what became of a request: 'whole', 'refused' before any byte of an answer, or what it got instead."""
    try:
        response = await http.post('/v1/chat/completions', json=body(max_tokens, stream))
    except aiohttp.ClientConnectionError:
        return 'refused'
    async with response:
        try:
            text = b''
            async for piece in response.content.iter_any():
                text += piece
                if begun is not None:
                    begun.set()
        except aiohttp.ClientError as error:
            return f'{response.status}, then {error!r}'
    if response.status != 200:
        return f'{response.status} {text.decode()}'
    if stream:
        *_, last, end = text.decode().strip().split('\n\n')
        whole = end == 'data: [DONE]' and json.loads(last.removeprefix('data: '))['choices'][0]['finish_reason']
    else:
        whole = json.loads(text)['choices'][0]['finish_reason']
    return 'whole' if whole == 'length' else text.decode()


async def keep_asking(url: str, stream: bool, fates: Counter[str]) -> None:
    """Ask again and again until the door is closed."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(LIVENESS_S)) as http:
        while True:
            became = await fate(http, 20, stream)
            fates[became] += 1
            if became != 'whole':
                return


async def test_sigterm_under_load(tmp_path: Path) -> None:
    model, engine = {'name': 'x', 'demo': 'tiny'}, {**CPU, 'dtype': 'float32', 'max_batch_size': 4}
    path = serve_file(
        tmp_path / 'serve.yaml',
        model=model,
        engine=engine,
        worker={'drain_timeout_s': LIVENESS_S},
        metrics={'port': None},
    )
    url = f'http://127.0.0.1:{yaml.safe_load(path.read_text())["http_options"]["port"]}'
    with subprocess.Popen(
        [sys.executable, '-m', 'actors.local', str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any('Ready at' in line for line in process.stdout)
        started = psutil.Process(process.pid).children(recursive=True)
        fates: Counter[str] = Counter()
        clients = [asyncio.create_task(keep_asking(url, number % 2 == 0, fates)) for number in range(CLIENTS)]
        async with (
            aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(LIVENESS_S)) as http,
            asyncio.timeout(LIVENESS_S),
        ):
            begun = asyncio.Event()
            long = asyncio.create_task(fate(http, 600, stream=True, begun=begun))
            await begun.wait()
            while fates['whole'] < CLIENTS:
                await asyncio.sleep(0.05)
            assert not long.done(), 'it must be cut by the signal if anything is'
            process.send_signal(signal.SIGTERM)
            assert await long == 'whole'
            await asyncio.gather(*clients)
            assert fates.keys() == {'whole', 'refused'}
            assert await asyncio.to_thread(process.wait, LIVENESS_S) == 0
    _, alive = psutil.wait_procs(started, timeout=LIVENESS_S)
    assert not alive


async def test_the_command_for_a_node_of_a_cluster() -> None:
    config = AppConfig.model_validate(
        {'model': {'name': 'x', 'demo': 'tiny'}, 'engine': {**CPU, 'dtype': 'float32'}, 'metrics': {'port': None}}
    )
    with serving(config) as service:
        environment = {**os.environ, 'RAY_ADDRESS': ray.get_runtime_context().gcs_address}

        async def drain(timeout_s: float) -> int:
            command = [sys.executable, '-m', 'actors.drain', '--timeout-s', str(timeout_s)]
            process = await asyncio.create_subprocess_exec(*command, env=environment)
            return await process.wait()

        async with (
            aiohttp.ClientSession(service.url, timeout=aiohttp.ClientTimeout(LIVENESS_S)) as http,
            asyncio.timeout(LIVENESS_S),
        ):
            begun = asyncio.Event()
            long = asyncio.create_task(fate(http, 3000, stream=True, begun=begun))
            await begun.wait()
            assert await drain(0.1) == 1, 'a request was left'
            assert await fate(http, 1, stream=False) == 'refused'
            assert not long.done()
            assert await drain(LIVENESS_S) == 0
            assert await long == 'whole'
