"""What a scrape costs: `python -m tests.bench.bench_scrape`."""

from __future__ import annotations

import argparse
import statistics
import time
import urllib.request

from lmdeploy.messages import ScheduleMetrics

from actors.exporter import Exporter
from actors.lmdeploy_metrics import LmdeployMetrics
from actors.metrics import deployment_families
from tests.actors import metric_values as values


def main() -> None:
    """Print the times of scrapes over HTTP."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--replicas', type=int, default=1)
    parser.add_argument('--ranks', type=int, default=8, help='of each replica')
    parser.add_argument('--scrapes', type=int, default=200)
    options = parser.parse_args()
    lmdeploy = LmdeployMetrics('demo', session_len=8192, num_drafts=3).families(ScheduleMetrics())
    engine = values.engine(*map(values.rank, range(options.ranks)), lmdeploy=lmdeploy)
    stats = values.router(*(values.worker(f'replica{n}', engine) for n in range(options.replicas)))
    times_ms = []
    with Exporter({'deployment': lambda: deployment_families(stats)}, port=0) as exporter:
        for _ in range(options.scrapes):
            start_s = time.perf_counter()
            with urllib.request.urlopen(f'http://127.0.0.1:{exporter.port}/metrics') as response:
                body = response.read()
            times_ms.append(1e3 * (time.perf_counter() - start_s))
    samples = sum(not line.startswith(b'#') for line in body.splitlines())
    cuts = statistics.quantiles(times_ms, n=100)
    print(
        f'{options.replicas} replicas of {options.ranks} ranks, {samples} samples, {len(body)} bytes: '
        f'median {statistics.median(times_ms):.1f} ms, p99 {cuts[98]:.1f} ms, of {options.scrapes} scrapes'
    )


if __name__ == '__main__':
    main()
