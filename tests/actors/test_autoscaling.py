"""How many workers a demand wants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.autoscaling import DEMAND, PressurePolicy, wanted_replicas


@pytest.mark.parametrize(
    ('demands', 'target', 'wanted'),
    [
        pytest.param([], 0.5, 3, id='nobody-reports-nothing-changes'),
        pytest.param([0.0], 0.5, 1, id='idle'),
        pytest.param([0.5], 0.5, 1, id='on-target'),
        pytest.param([0.51], 0.5, 2, id='above-target'),
        pytest.param([1.0, 1.0], 0.5, 2, id='two-workers-know-the-same-demand'),
        pytest.param([0.9, 1.1], 0.5, 3, id='the-latest-news-count'),
        pytest.param([3 * 0.1], 0.1, 3, id='rounding-costs-no-worker'),
        pytest.param([4.0], 1.0, 4, id='a-long-queue'),
    ],
)
def test_wanted_replicas(demands: list[float], target: float, wanted: int) -> None:
    assert wanted_replicas(demands, target, current=3) == wanted


@pytest.mark.parametrize(
    ('metrics', 'wanted'),
    [
        pytest.param({}, 2, id='no-metrics-yet'),
        pytest.param({'running_requests': {'a': 50.0}}, 2, id='only-those-of-serve'),
        pytest.param({DEMAND: {'a': 2.0, 'b': 2.0}}, 4, id='demand'),
    ],
)
def test_the_policy_reads_what_workers_report(metrics: dict[str, Any], wanted: int) -> None:
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2)
    assert PressurePolicy(0.5)(context) == (wanted, {})
