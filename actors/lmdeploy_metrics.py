"""LMDeploy's own figures of an embedded engine, under names without colons.

LMDeploy's HTTP server feeds its Prometheus logger from the outputs it passes on. Whoever runs the engine without that
server feeds the same logger here, so the figures mean what LMDeploy's users know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lmdeploy.messages import ResponseType, ScheduleMetrics
from lmdeploy.metrics.loggers import PrometheusStatLogger
from lmdeploy.metrics.stats import IterationStats, RequestStats, SchedulerStats, SpeculativeDecodingStats
from prometheus_client import REGISTRY
from prometheus_client.core import Metric

_PREFIX = 'lmdeploy:'
_SERVER_ONLY = frozenset(
    (
        'backend_config',
        'num_requests_succeeded',
        'num_requests_failed',
        'num_api_requests_routed',
        'num_api_requests_waiting',
    )
)
"""Figures of LMDeploy's HTTP server, which is not there."""
_AVERAGES = frozenset(
    ('spec_decode_mean_accept_rate', 'spec_decode_mean_accept_length', 'spec_decode_per_position_accept_rate')
)
"""Averages since the start; PromQL derives those of any time from the counters beside them."""
_SPECULATIVE = 'spec_decode_'
_RENAMED = {'iteration_tokens_total': 'iteration_tokens', 'iter_token_latency': 'inter_token_latency_seconds'}
"""A histogram that would read as a counter, and one without its unit."""


class LmdeployMetrics:
    """LMDeploy's Prometheus logger for the one engine of this process.

    Args:
        model_name: value of the `model_name` label.
        session_len: most tokens of a sequence; the upper end of the token histograms.
        num_drafts: speculative tokens per step, 0 without speculative decoding.
    """

    def __init__(self, model_name: str, session_len: int, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._scheduler = SchedulerStats()
        self._logger = PrometheusStatLogger(model_name, session_len)

    def request(self, prompt_tokens: int) -> RequestObserver:
        """Return the observer of a request that arrives now."""
        return RequestObserver(self._logger, RequestStats(prompt_tokens=prompt_tokens), self._num_drafts)

    def families(self, schedule: ScheduleMetrics) -> tuple[Metric, ...]:
        """Return all figures of this moment; `schedule` is what the engine's `get_schedule_metrics()` says."""
        self._scheduler.update_from_schedule_metrics(schedule)
        self._logger.record_schedule(self._scheduler)
        return tuple(rename(REGISTRY.collect(), speculative=self._num_drafts > 0))


class RequestObserver:
    """Feeds the outputs of one request to LMDeploy's logger."""

    def __init__(self, logger: PrometheusStatLogger, request: RequestStats, num_drafts: int) -> None:
        self._logger = logger
        self._request = request
        self._num_drafts = num_drafts

    def observe(self, output: Any) -> None:
        """Take note of one `EngineOutput`, as soon as it arrives."""
        iteration = IterationStats()
        if output.req_metrics:
            self._request.cached_tokens = output.req_metrics.cached_tokens
            self._request.update_from_events(output.req_metrics.engine_events)
        iteration.update_from_output(output, self._request)
        self._logger.record_iteration(iteration)
        if self._num_drafts:
            speculative = SpeculativeDecodingStats(self._num_drafts)
            speculative.update_from_output(output)
            self._logger.record_specdecode(speculative)
        if output.status == ResponseType.FINISH:
            self._logger.record_finish(self._request)


def rename(families: Iterable[Metric], speculative: bool) -> Iterable[Metric]:
    """Yield LMDeploy's families as `lmdeploy_…`, without the label of the data-parallel rank."""
    for family in families:
        name = family.name.removeprefix(_PREFIX)
        if name == family.name or name in _SERVER_ONLY | _AVERAGES:
            continue
        if name.startswith(_SPECULATIVE) and not speculative:
            continue
        new_name = f'lmdeploy_{_RENAMED.get(name, name)}'
        renamed = Metric(new_name, family.documentation, family.type)
        for sample in family.samples:
            # A reason is the representation of an enumeration's member there.
            labels = {label: value.removeprefix('ResponseType.') for label, value in sample.labels.items()}
            labels.pop('engine', None)
            renamed.add_sample(new_name + sample.name.removeprefix(family.name), labels, sample.value)
        yield renamed
