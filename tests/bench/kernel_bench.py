"""The harness of kernel benchmarks: tests first, then medians of CUDA graph replays against the floor of the traffic.

Every contender gets the same shapes, the same cursors and as many layers as keep anything from staying in the L2. Its
constructor allocates, calling it launches every layer once, and `states` has an entry a layer.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer

from replayssm.cursor import FLUSH
from tests.bench.kernel_case import Case, Unavailable

COPY_BYTES = 2**31
Contenders = Mapping[str, Callable[[Any], Any]]


@dataclass
class Row:
    """One case as it is written to JSON; `us` holds null where `reasons` says why."""

    op: str
    tokens: int
    batch: int
    checkpoint_dtype: str
    record_dtype: str
    flush_share: float
    floor_us: float
    card: str
    versions: dict[str, str]
    commit: str
    us: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    asked_us: float | None = None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What one benchmark measures.

    Attributes:
        name: of the layer, `gdn` or `kda`; also of the folder with its tests.
        cases: rows of the table.
        contenders: by name.
        own: names that must run where they are available; the others may fail.
        by_record: names that know our record dtypes; the others are measured once for all of them.
        asked_us: microseconds that our kernel was asked to reach, by tokens and batch, with float32 checkpoints.
    """

    name: str
    cases: Sequence[Case]
    contenders: Contenders
    own: frozenset[str] = frozenset({'ours', 'cp.async', 'portable', 'stock'})
    by_record: frozenset[str] = frozenset({'ours', 'cp.async', 'portable'})
    asked_us: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def run(self, out: Path, commit: str, workers: int, batches: Sequence[int] = ()) -> None:
        """Run the kernels' tests on the GPU, then measure and write every case, or those of some batches.

        Raises:
            SystemExit: the tests failed; nothing is measured then.
            ValueError: no case has one of the batches.
        """
        known = {case.batch for case in self.cases}
        if not known.issuperset(batches):
            raise ValueError(f'batch: expected some of {sorted(known)}, got {list(batches)}')
        require_tests(self.name, workers)
        commit = commit or subprocess.check_output(['git', 'rev-parse', 'HEAD'], text=True).strip()
        bandwidth, card, found = copy_bytes_per_us(), torch.cuda.get_device_name(), versions()
        print(f'{card}: device copy {bandwidth / 1e6:.2f} TB/s, {found}')
        outcomes: dict[tuple[str, Case], tuple[float | None, str]] = {}
        rows = []
        for case in (case for case in self.cases if not batches or case.batch in batches):
            row = Row(
                op=f'{self.name}_decode' if case.tokens == 1 else f'{self.name}_verify',
                **asdict(case),
                flush_share=round(float(case.advance().table[:, FLUSH].float().mean()), 4),
                floor_us=round(case.traffic_bytes() / bandwidth, 2),
                card=card,
                versions=found,
                commit=commit,
            )
            if case.checkpoint_dtype == 'float32':
                row.asked_us = self.asked_us.get((case.tokens, case.batch))
            self._measure(case, row, outcomes)
            rows.append(row)
            print(line(row), flush=True)
            out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + '\n')

    def _measure(self, case: Case, row: Row, outcomes: dict[tuple[str, Case], tuple[float | None, str]]) -> None:
        """Fill `row.us` and `row.reasons`."""
        for name in self.contenders:
            same = case if name in self.by_record else dataclasses.replace(case, record_dtype='bfloat16')
            if (name, same) not in outcomes:
                outcomes[name, same] = self._outcome(name, same)
            row.us[name], reason = outcomes[name, same]
            if reason:
                row.reasons[name] = reason

    def _outcome(self, name: str, case: Case) -> tuple[float | None, str]:
        """Microseconds of a contender, or None and why; a peer may fail, our own must run."""
        expected = (Unavailable, torch.OutOfMemoryError) if name in self.own else Exception
        try:
            return round(median_us(self.contenders[name](case)), 2), ''
        except expected as error:
            return None, f'{type(error).__name__}: {error}'.splitlines()[0]
        finally:
            gc.collect()
            torch.cuda.empty_cache()

    def plot(self, data: Path, out: Path | None) -> None:
        """Draw microseconds over batch for every window and dtypes that were measured at more than two batches."""
        import matplotlib

        matplotlib.use('Agg')
        from matplotlib import pyplot

        rows = [Row(**row) for row in json.loads(data.read_text())]
        sizes = Counter((row.tokens, row.checkpoint_dtype, row.record_dtype) for row in rows)
        panels = sorted(panel for panel, size in sizes.items() if size > 2)
        lines = -(-len(panels) // 3)
        figure, axes = pyplot.subplots(lines, 3, figsize=(13, 3.75 * lines), squeeze=False)
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        for axis, panel in zip(axes.flat, panels, strict=False):
            _draw(axis, [row for row in rows if (row.tokens, row.checkpoint_dtype, row.record_dtype) == panel])
            axis.set_title('T = {}, {} / {}'.format(*panel))
        axes.flat[0].legend()
        title = f'{self.name.upper()} decode on {rows[0].card}: checkpoint / record dtype, L = 16, ragged cursors'
        figure.suptitle(title)
        figure.tight_layout()
        figure.savefig(out or data.with_suffix('.png'), dpi=110)


def add_commands(app: typer.Typer, benchmark: Benchmark) -> None:
    """Give a program the commands `run` and `plot`."""

    @app.command()
    def run(
        out: Annotated[Path, typer.Option(help='JSON file to write.')],
        commit: Annotated[str, typer.Option(help='Commit measured; asked of git unless given.')] = '',
        workers: Annotated[int, typer.Option(help='Processes that the tests are spread over.')] = 0,
        batch: Annotated[list[int] | None, typer.Option(help='Only this one; may be repeated.')] = None,
    ) -> None:
        """Run the kernels' tests on the GPU, then measure and write every case."""
        benchmark.run(out, commit, workers, batch or ())

    @app.command()
    def plot(data: Path, out: Annotated[Path | None, typer.Option(help='PNG to write.')] = None) -> None:
        """Draw microseconds over batch for every window and dtypes that were measured at more than two batches."""
        benchmark.plot(data, out)


def require_tests(layer: str, workers: int) -> None:
    """Run the tests of a layer's kernels on the GPU.

    Raises:
        SystemExit: they failed.
    """
    spread = ['-n', str(workers)] if workers else []
    command = [sys.executable, '-m', 'pytest', '-q', '--device', 'cuda', '-k', layer, 'tests/replay', f'tests/{layer}']
    tests = subprocess.run([*command, *spread], check=False)
    if tests.returncode:
        raise SystemExit(f'The tests of the kernels failed ({tests.returncode}): no figures.')


def copy_bytes_per_us() -> float:
    """Bytes read and written by a large device copy in a microsecond."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device='cuda')
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), return_mode='median')
    return 2 * COPY_BYTES / milliseconds / 1e3


def median_us(contender: Any) -> float:
    """Microseconds of one layer's launch."""
    contender()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        contender()
    milliseconds = triton.testing.do_bench(graph.replay, warmup=5, rep=25, return_mode='median')
    return float(milliseconds * 1e3 / len(contender.states))


def versions() -> dict[str, str]:
    found = {'torch': torch.__version__, 'triton': triton.__version__}
    for name in ('lmdeploy', 'sglang', 'fla-core', 'flashinfer-python'):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def line(row: Row) -> str:
    """A row as a line of the printed table."""
    label = f'T={row.tokens} B={row.batch:<3} {row.checkpoint_dtype}/{row.record_dtype}'
    ours, stock = row.us['ours'], row.us.get('stock')
    times = ' '.join(f'{name} {us:.1f}' for name, us in row.us.items() if us is not None)
    words = [f'{label:32} floor {row.floor_us:.1f}', times]
    if ours and stock:
        words.append(f'stock/ours {stock / ours:.2f}')
    words.append(f'ours/floor {ours / row.floor_us if ours else 0:.2f}')
    if row.asked_us is not None:
        words.append(f'asked {row.asked_us:g}')
    return ' '.join(words)


def _draw(axis: Any, rows: Sequence[Row]) -> None:
    batches = [row.batch for row in rows]
    for name in rows[0].us:
        points = [(row.batch, row.us[name]) for row in rows if row.us[name] is not None]
        if points:
            axis.plot(*zip(*points, strict=True), marker='o', markersize=3, label=name)
    axis.plot(batches, [row.floor_us for row in rows], 'k--', linewidth=1, label='floor')
    axis.set(xscale='log', yscale='log', xlabel='batch', ylabel='µs a layer')
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.grid(alpha=0.3)
