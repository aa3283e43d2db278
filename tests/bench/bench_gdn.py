"""GDN decode kernels on one GPU: microseconds of a layer's launch against the floor of its memory traffic.

    python -m tests.bench.bench_gdn run --out docs/data/bench_gdn.json     tests, then figures
    python -m tests.bench.bench_gdn plot docs/data/bench_gdn.json          the same figures as a picture

Figures are medians of CUDA graph replays. Nothing is reported unless the kernels' tests pass in the same run.
"""

from __future__ import annotations

import statistics

import torch
import typer

from tests.bench.gdn_contenders import CONTENDERS, GdnCase
from tests.bench.kernel_bench import Benchmark, add_commands

app = typer.Typer(help=__doc__, no_args_is_help=True)

BATCHES = (1, 8, 32, 64, 128, 256)
CASES = [
    *(GdnCase(1, batch, *dtypes) for dtypes in (('float32', 'float32'), ('float32', 'bfloat16')) for batch in BATCHES),
    *(GdnCase(4, batch, *dtypes) for dtypes in (('float32', 'float32'), ('float32', 'bfloat16')) for batch in BATCHES),
    *(GdnCase(tokens, batch, 'bfloat16', 'bfloat16') for tokens in (1, 4) for batch in BATCHES),
    *(GdnCase(tokens, 64, 'float32', 'float32') for tokens in (2, 8)),
    *(GdnCase(8, batch, 'float32', 'float32') for batch in (8, 256)),
]
BENCHMARK = Benchmark('gdn', CASES, CONTENDERS)

add_commands(app, BENCHMARK)


@app.command()
def launch_cost(calls: int = 300) -> None:
    """Print the host's microseconds of one eager launch, batch 1."""
    import time

    for tokens in (1, 4):
        contender = CONTENDERS['ours'](GdnCase(tokens, 1, 'float32', 'float32'))
        contender()
        samples = []
        for _ in range(calls // len(contender.states) + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            contender()
            samples.append((time.perf_counter() - start) * 1e6 / len(contender.states))
        print(f'T={tokens}: {statistics.median(samples):.1f} us on the host')


if __name__ == '__main__':
    app()
