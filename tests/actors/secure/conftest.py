"""A deployment as on a public address: certificate, keys, an administrators' token, and a log that says all it can."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import ray

from actors.config import AppConfig
from actors.local import Deployment, wait_until_ready
from tests.actors.certificates import make_pair
from tests.patience import LIVENESS_S
from tests.ports import free_port

MAX_BODY_BYTES = 100_000
KEY = 'key-of-the-tests'
MODEL = '<img src=x onerror="document.title=\'run\'">'
"""A name that a page which takes it for markup would run."""


@dataclass(frozen=True, slots=True)
class Secured:
    """The deployment at `url`.

    Attributes:
        certificate: What clients have to trust.
        keys: File of API keys.
        logs: Folder of Ray's and Serve's logs.
    """

    url: str
    certificate: Path
    keys: Path
    logs: Path


@pytest.fixture(scope='package')
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Serve the demo model; ready when the fixture is."""
    folder = tmp_path_factory.mktemp('secured')
    pair = make_pair(folder)
    keys = folder / 'keys'
    keys.write_text(f'# for tests\n{KEY}\n')
    (folder / 'admin').write_text('root')
    config = AppConfig.model_validate(
        {
            'model': {'name': MODEL, 'demo': 'tiny'},
            'engine': {
                'device': 'cpu',
                'dtype': 'float32',
                'session_len': 512,
                'max_batch_size': 4,
                'num_gpu_blocks': 136,
                'block_size': 16,
                'speculative': {'num_tokens': 3},
                'log_level': 'DEBUG',
            },
            'worker': {'report_period_s': 0.2},
            'api': {
                'api_keys_file': str(keys),
                'admin_token_file': str(folder / 'admin'),
                'max_body_bytes': MAX_BODY_BYTES,
                'allow_origins': ['https://app.example'],
            },
            'metrics': {'port': None},
        }
    )
    port = free_port()
    url = f'https://127.0.0.1:{port}'
    logging = {'log_level': 'DEBUG', 'enable_access_log': True}
    with Deployment(config, 'test', {'host': '127.0.0.1', 'port': port, **pair.http_options()}, logging):
        wait_until_ready(url)
        yield Secured(url, pair.certificate, keys, Path(ray._private.worker.global_worker.node.get_logs_dir_path()))


@pytest.fixture
async def http(secured: Secured) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that trusts the certificate and has no key."""
    trust = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(secured.certificate)))
    async with aiohttp.ClientSession(secured.url, connector=trust, timeout=aiohttp.ClientTimeout(LIVENESS_S)) as made:
        yield made
