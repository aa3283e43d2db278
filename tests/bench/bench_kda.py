"""KDA decode kernels on one GPU: microseconds of a layer's launch against the floor of its memory traffic.

    python -m tests.bench.bench_kda run --out docs/data/bench_kda.json     tests, then figures
    python -m tests.bench.bench_kda plot docs/data/bench_kda.json          the same figures as a picture

The shape is GLM-5.3-Flash's on one of four GPUs. Figures are medians of CUDA graph replays. Nothing is reported unless
the kernels' tests pass in the same run.
"""

from __future__ import annotations

import typer

from tests.bench.kda_contenders import CONTENDERS, KdaCase
from tests.bench.kernel_bench import Benchmark, add_commands

app = typer.Typer(help=__doc__, no_args_is_help=True)

BATCHES = (8, 16, 32, 64, 128, 256)
CASES = [
    *(KdaCase(tokens, batch, 'float32', 'float32') for tokens in (1, 4) for batch in BATCHES),
    *(KdaCase(tokens, batch, 'float32', 'bfloat16') for tokens in (1, 4) for batch in BATCHES),
]
ASKED_US = {(1, 64): 28.0, (1, 256): 90.0, (4, 64): 46.0, (4, 256): 142.0}
"""On an H200, where a prototype of this kernel has been."""
BENCHMARK = Benchmark('kda', CASES, CONTENDERS, asked_us=ASKED_US)

add_commands(app, BENCHMARK)


if __name__ == '__main__':
    app()
