"""How many workers a deployment needs; pure.

Serve ships this module by value into its controller: it may import nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

DEMAND = 'demand'
"""Name of the number that every worker reports: running and waiting requests, in capacities of one worker."""


def wanted_replicas(demands: Iterable[float], target_pressure: float, current: int) -> int:
    """Return how many workers bring the pressure, that is demand per worker, down to its target.

    Args:
        demands: The same demand as the workers know it; who has heard of it last may know a little less or more.
        target_pressure: Wanted share of the capacity in use.
        current: The answer while no worker reports.
    """
    known = list(demands)
    if not known:
        return current
    # A little slack: sums of floats should not cost a worker.
    return max(1, math.ceil(max(known) / target_pressure - 1e-9))


class PressurePolicy:
    """Serve's form of `wanted_replicas`; Serve itself applies bounds and delays."""

    def __init__(self, target_pressure: float) -> None:
        self._target_pressure = target_pressure

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Decide on Serve's `AutoscalingContext`."""
        demands = ctx.aggregated_metrics.get(DEMAND, {}).values()
        return wanted_replicas(demands, self._target_pressure, ctx.target_num_replicas), {}
