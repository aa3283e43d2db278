"""Benchmarks of kernels without a GPU: the bytes behind the floor, the cursors, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from replayssm.cursor import FLUSH
from tests.bench import bench_gdn, bench_kda, kernel_bench
from tests.bench.gdn_contenders import GdnCase
from tests.bench.kda_contenders import KdaCase
from tests.bench.kernel_bench import Benchmark, Row, line
from tests.bench.kernel_case import Case


@pytest.mark.parametrize(
    ('case', 'state', 'record', 'activations'),
    [
        # q, k, v, o, b and a gate logit a head: bf16; a record is a bf16 key, its norm, d and the gate sum
        pytest.param(GdnCase(1, 64, 'float32', 'bfloat16'), 2 << 20, 16 * 260 + 32 * 260, 24704, id='gdn'),
        pytest.param(GdnCase(4, 64, 'bfloat16', 'float32'), 1 << 20, 16 * 260 + 32 * 516, 98816, id='gdn-window'),
        # and the same with a gate logit a channel, which the record keeps too
        pytest.param(KdaCase(1, 64, 'float32', 'float32'), 1 << 20, 16 * 260 + 16 * 512 + 16 * 256, 20512, id='kda'),
        pytest.param(KdaCase(4, 64, 'float32', 'bfloat16'), 1 << 20, 16 * 260 + 16 * 512, 82048, id='kda-window'),
    ],
)
def test_floor_counts_every_byte_once(case: Case, state: int, record: int, activations: int) -> None:
    valid, flushes = case.valid('cpu'), case.advance('cpu').table[:, FLUSH].sum()
    moved = 64 * (state + activations + case.tokens * record) + int(valid.sum()) * record + int(flushes) * state
    assert case.traffic_bytes('cpu') == moved


def test_the_floor_of_the_published_figures_is_what_it_was() -> None:
    assert GdnCase(1, 256, 'float32', 'float32').traffic_bytes('cpu') / 4.24e6 == pytest.approx(147.7, rel=0.002)


@pytest.mark.parametrize('batch', [16, 64, 256])
def test_cursors_are_ragged(batch: int) -> None:
    """One token a step flushes one row in sixteen, windows one in five; a benchmark that never flushes flatters."""
    single, window = KdaCase(1, batch, 'float32', 'float32'), KdaCase(4, batch, 'float32', 'float32')
    assert set(single.valid('cpu').tolist()) == set(range(1, 17))
    assert single.advance('cpu').table[:, FLUSH].float().mean() == 1 / 16
    assert window.advance('cpu').table[:, FLUSH].float().mean() == pytest.approx(0.2, abs=0.05)


def test_batches_that_no_case_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'batch: expected some of \[1, 8, 32, 64, 128, 256\], got \[64, 7\]'):
        bench_gdn.BENCHMARK.run(tmp_path / 'out.json', 'commit', 0, [64, 7])


@pytest.mark.parametrize('module', [bench_gdn, bench_kda], ids=['gdn', 'kda'])
def test_nothing_is_reported_without_the_tests(module: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def fail(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(kernel_bench.subprocess, 'run', fail)
    benchmark: Benchmark = module.BENCHMARK  # type: ignore[attr-defined]
    with pytest.raises(SystemExit, match='no figures'):
        benchmark.run(tmp_path / 'out.json', 'commit', 0)
    layer, tests = benchmark.name, [sys.executable, '-m', 'pytest', '-q', '--device', 'cuda']
    assert asked == [[*tests, '-k', layer, 'tests/replay', f'tests/{layer}']]
    assert not (tmp_path / 'out.json').exists()


def test_every_asked_figure_has_a_case() -> None:
    rows = {(case.tokens, case.batch) for case in bench_kda.CASES}
    assert set(bench_kda.ASKED_US) <= rows


def test_a_line_names_what_was_asked() -> None:
    row = Row('kda_decode', 1, 64, 'float32', 'float32', 0.06, 20.0, 'card', {}, '', {'ours': 27.0, 'sglang': None})
    row.asked_us = 28.0
    assert line(row).split(maxsplit=3)[-1] == 'floor 20.0 ours 27.0 ours/floor 1.35 asked 28'
