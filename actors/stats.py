"""The router's counters and histograms, kept as plain numbers and read as values."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from actors.messages import Arrival, Histogram, Outcome

# Bounds in seconds, those of vLLM's metrics of the same meaning, so that existing dashboards compare.
TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TPOT_BOUNDS_S = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
E2E_BOUNDS_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


class HistogramCounter:
    """Counts samples per bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        if any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f'bounds: expected ascending numbers, got {bounds}')
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add one sample; a sample equal to a bound counts below it, as Prometheus has it."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> Histogram:
        """Return the counts so far."""
        return Histogram(self._bounds, tuple(self._counts), self._sum)


@dataclass(slots=True)
class RequestCounters:
    """What the router counts about requests since its start."""

    admitted: int = 0
    resumed: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    ttft_s: HistogramCounter = field(default_factory=lambda: HistogramCounter(TTFT_BOUNDS_S))
    tpot_s: HistogramCounter = field(default_factory=lambda: HistogramCounter(TPOT_BOUNDS_S))
    e2e_s: HistogramCounter = field(default_factory=lambda: HistogramCounter(E2E_BOUNDS_S))

    def admit(self, arrival: Arrival) -> None:
        """Count one request that was given to a worker, for the first time or again."""
        if arrival.resumed is None:
            self.admitted += 1
        else:
            self.resumed[arrival.resumed] += 1

    def finish(self, outcome: Outcome) -> None:
        """Count one finished request."""
        self.finished[outcome.finish_reason] += 1
        self.prompt_tokens += outcome.prompt_tokens
        self.generation_tokens += outcome.generation_tokens
        for histogram, value in (
            (self.ttft_s, outcome.ttft_s),
            (self.tpot_s, outcome.tpot_s),
            (self.e2e_s, outcome.e2e_s),
        ):
            if value is not None:
                histogram.observe(value)
