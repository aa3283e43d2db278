"""A real Prometheus server, from its configuration to the answers of its HTTP API."""

from __future__ import annotations

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.patience import LIVENESS_S
from tests.tools import tool


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server at `url`."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of one API call.

        Raises:
            ValueError: Prometheus refused it; the message is Prometheus's.
        """
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f'{self.url}/api/v1/{path}?{query}', timeout=LIVENESS_S) as response:
                return json.load(response)['data']
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)['error']) from None

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and values of an expression now; what is not a number is left out."""
        data = self.get('query', query=expr)
        assert data['resultType'] == 'vector', expr
        samples = [(sample['metric'], float(sample['value'][1])) for sample in data['result']]
        return [(labels, value) for labels, value in samples if not math.isnan(value)]


@contextmanager
def serving(folder: Path, port: int, rules: Path, targets: Mapping[str, int]) -> Iterator[Prometheus]:
    """Run a server in `folder` that scrapes `targets`, ports of this machine by job, every second."""
    config = folder / 'prometheus.yml'
    jobs = [
        {'job_name': job, 'static_configs': [{'targets': [f'127.0.0.1:{target}']}]} for job, target in targets.items()
    ]
    period = {'scrape_interval': '1s', 'scrape_timeout': '1s', 'evaluation_interval': '1s'}
    config.write_text(yaml.safe_dump({'global': period, 'rule_files': [str(rules)], 'scrape_configs': jobs}))
    command = [
        tool('prometheus'),
        f'--config.file={config}',
        f'--storage.tsdb.path={folder / "data"}',
        f'--web.listen-address=127.0.0.1:{port}',
        '--log.level=warn',
    ]
    with (folder / 'log').open('w') as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            _wait_until_ready(f'http://127.0.0.1:{port}/-/ready', process, folder / 'log')
            yield Prometheus(f'http://127.0.0.1:{port}')
        finally:
            process.terminate()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + LIVENESS_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f'Prometheus did not start within {LIVENESS_S} s: {log.read_text()}')
