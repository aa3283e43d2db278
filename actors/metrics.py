"""Values to Prometheus metric families. One table of specifications makes both the families and their documentation.

Counters hold only what grows, units are seconds and bytes, names are free of colons, and no label carries the id of a
request or session. A value that could not be measured makes no sample; a reason that has not occurred yet is a zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import Metric

from actors.engine_metrics import ENGINES, GPUS, RANKS
from actors.messages import FinishReason, RefusalReason, ResumeReason, RouterStats, WorkerReport, WorkerState
from actors.metric_spec import MetricGroup, MetricSpec, each, one
from actors.sessions import InvalidationReason, RecomputeReason, SessionState


def _state(report: WorkerReport) -> Mapping[str, float]:
    return {report.state: 1}


REQUESTS: MetricGroup[RouterStats] = MetricGroup(
    'Requests',
    'the router, which sees every request of a model once, however many ingress replicas there are',
    ('model_name',),
    (
        MetricSpec(
            'replayssm_requests_running', 'gauge', 'Requests that hold a lease on a worker.', one(lambda r: r.running)
        ),
        MetricSpec('replayssm_requests_queued', 'gauge', 'Requests that wait for a worker.', one(lambda r: r.queued)),
        MetricSpec(
            'replayssm_queued_tokens',
            'gauge',
            'Prompt tokens of the requests that wait for a worker.',
            one(lambda r: r.queued_tokens),
        ),
        MetricSpec(
            'replayssm_requests_admitted_total',
            'counter',
            'Requests given to a worker.',
            one(lambda r: r.admitted_total),
        ),
        MetricSpec(
            'replayssm_requests_resumed_total',
            'counter',
            'Requests given to another worker after the first one was lost.',
            each(lambda r: r.resumed_total, ResumeReason),
            ('reason',),
        ),
        MetricSpec(
            'replayssm_requests_rejected_total',
            'counter',
            'Requests refused.',
            each(lambda r: r.rejected_total, RefusalReason),
            ('reason',),
        ),
        MetricSpec(
            'replayssm_requests_finished_total',
            'counter',
            'Requests that ended, whether or not they were admitted.',
            each(lambda r: r.finished_total, FinishReason),
            ('reason',),
        ),
        MetricSpec(
            'replayssm_prompt_tokens_total',
            'counter',
            'Prompt tokens of ended requests.',
            one(lambda r: r.prompt_tokens_total),
        ),
        MetricSpec(
            'replayssm_generation_tokens_total',
            'counter',
            'Generated tokens of ended requests.',
            one(lambda r: r.generation_tokens_total),
        ),
        MetricSpec(
            'replayssm_time_to_first_token_seconds',
            'histogram',
            'From the arrival at the ingress to the first token.',
            one(lambda r: r.ttft_s),
        ),
        MetricSpec(
            'replayssm_time_per_output_token_seconds',
            'histogram',
            'Time of a request per token behind its first one.',
            one(lambda r: r.tpot_s),
        ),
        MetricSpec(
            'replayssm_e2e_request_latency_seconds',
            'histogram',
            'From the arrival at the ingress to the last token.',
            one(lambda r: r.e2e_s),
        ),
    ),
)

SESSIONS: MetricGroup[RouterStats] = MetricGroup(
    'Sessions',
    "the router's session table; only requests that name their session are in it",
    ('model_name',),
    (
        MetricSpec(
            'replayssm_sessions',
            'gauge',
            'Named sessions: with a request that runs, with a prefix checkpoint somewhere, or with a history only.',
            each(lambda r: r.sessions.by_state, SessionState),
            ('state',),
        ),
        MetricSpec(
            'replayssm_session_invalidations_total',
            'counter',
            'Sessions whose live or resident state was given up.',
            each(lambda r: r.sessions.invalidations_total, InvalidationReason),
            ('reason',),
        ),
        MetricSpec(
            'replayssm_session_tokens_recomputed_total',
            'counter',
            'Prompt tokens that the history of the session had too and that were computed again.',
            each(lambda r: r.sessions.recomputed_tokens_total, RecomputeReason),
            ('reason',),
        ),
        MetricSpec(
            'replayssm_session_tokens_reused_total',
            'counter',
            'Prompt tokens, of named sessions or not, whose state a worker had.',
            one(lambda r: r.sessions.reused_tokens_total),
        ),
        MetricSpec(
            'replayssm_session_prefix_hits_total',
            'counter',
            'Requests, of named sessions or not, that found a prefix checkpoint.',
            one(lambda r: r.sessions.prefix_hits_total),
        ),
    ),
)

WORKERS: MetricGroup[WorkerReport] = MetricGroup(
    'Workers',
    "each worker's last report",
    ('model_name', 'replica'),
    (
        MetricSpec(
            'replayssm_worker_state',
            'gauge',
            '1 for the state that the worker is in.',
            each(_state, WorkerState),
            ('state',),
        ),
        MetricSpec(
            'replayssm_worker_capacity', 'gauge', 'Requests that the worker runs at once.', one(lambda w: w.capacity)
        ),
    ),
)

SOURCES: MetricGroup[bool] = MetricGroup(
    'Exporter',
    'the exporter itself',
    ('source',),
    (
        MetricSpec(
            'replayssm_source_up',
            'gauge',
            '1 when the source answered this scrape in time; the metrics of one that did not are absent.',
            one(float),
        ),
    ),
)

GROUPS: tuple[MetricGroup[Any], ...] = (REQUESTS, SESSIONS, WORKERS, ENGINES, RANKS, GPUS, SOURCES)


def deployment_families(stats: RouterStats) -> list[Metric]:
    """Return the families of one model: its requests, workers, engines, ranks and GPUs, and LMDeploy's own."""
    name = stats.model_name
    workers = [((name, worker.worker_id), worker) for worker in stats.workers]
    engines = [(labels, worker.engine) for labels, worker in workers if worker.engine is not None]
    ranks = [((*labels, str(rank.rank)), rank) for labels, engine in engines for rank in engine.replay.ranks]
    gpus = [((*labels, rank.gpu.node, str(rank.gpu.index)), rank.gpu) for labels, rank in ranks if rank.gpu is not None]
    return [
        *REQUESTS.families([((name,), stats)]),
        *SESSIONS.families([((name,), stats)]),
        *WORKERS.families(workers),
        *ENGINES.families(engines),
        *RANKS.families(ranks),
        *GPUS.families(gpus),
        *merge_families((replica, engine.lmdeploy) for (_, replica), engine in engines),
    ]


def merge_families(engines: Iterable[tuple[str, Iterable[Metric]]]) -> list[Metric]:
    """Join the families of several engines, so that each name occurs once; every sample gets its `replica` label."""
    merged: dict[str, Metric] = {}
    for replica, families in engines:
        for family in families:
            target = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                target.add_sample(sample.name, {**sample.labels, 'replica': replica}, sample.value)
    return list(merged.values())


def source_families(up: Mapping[str, bool]) -> list[Metric]:
    """Return the families about the exporter's sources."""
    return SOURCES.families([((name,), answered) for name, answered in up.items()])
