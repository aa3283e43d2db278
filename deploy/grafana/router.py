"""Who waits, who is refused, which sessions keep their state, and where they run."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models.units import OpsPerSecond, PercentUnit, Seconds, Short

from deploy.grafana.panels import ENGINE, MODEL, Query, Row, lines, make_dashboard, quantile, rate


def build() -> Dashboard:
    """Return the dashboard."""
    return make_dashboard(
        'replayssm-router',
        'Sessions and router',
        'Admission, state of sessions, and placement of requests.',
        'en/monitoring.md#sessions-and-router',
        (_admission(), _sessions(), _placement()),
    )


def _admission() -> Row:
    refused, admitted = rate('replayssm_requests_rejected_total'), rate('replayssm_requests_admitted_total')
    return Row(
        'Admission',
        (
            lines(
                'Requests waiting',
                'For a worker, in the router.',
                Short,
                Query(f'sum by (model_name) (replayssm_requests_queued{MODEL})', '{{model_name}}'),
                width=8,
            ),
            lines(
                'Prompt tokens waiting',
                'Of the requests that wait for a worker.',
                Short,
                Query(f'sum by (model_name) (replayssm_queued_tokens{MODEL})', '{{model_name}}'),
                width=8,
            ),
            lines(
                'Requests admitted and refused',
                'Per second.',
                OpsPerSecond,
                Query(admitted, 'admitted'),
                Query(refused, 'refused'),
                width=8,
            ),
            lines(
                'Share refused, by reason',
                'Of all requests that asked for admission.',
                PercentUnit,
                Query(
                    f'{rate("replayssm_requests_rejected_total", "reason")} / ignoring (reason) group_left () '
                    f'({refused} + {admitted})',
                    '{{reason}}',
                ),
                stacked=True,
                width=8,
            ),
            lines(
                'First token at the ingress and in the engine, p90',
                'What lies between the two is the wait for a worker and the way there.',
                Seconds,
                Query(quantile(0.9, 'replayssm_time_to_first_token_seconds'), 'ingress'),
                Query(quantile(0.9, 'lmdeploy_time_to_first_token_seconds', ENGINE), 'engine'),
                width=8,
            ),
            lines(
                'Requests ended',
                'Per second, by reason.',
                OpsPerSecond,
                Query(rate('replayssm_requests_finished_total', 'reason'), '{{reason}}'),
                stacked=True,
                width=8,
            ),
        ),
    )


def _sessions() -> Row:
    recomputed, reused = 'replayssm_session_tokens_recomputed_total', 'replayssm_session_tokens_reused_total'
    return Row(
        'Sessions',
        (
            lines(
                'Sessions by state',
                'Named sessions: with a request that runs, with a prefix checkpoint somewhere, or with a history only.',
                Short,
                Query(f'sum by (state) (replayssm_sessions{MODEL})', '{{state}}'),
                stacked=True,
                width=8,
            ),
            lines(
                'State of sessions given up',
                'Per second, by reason: early stops, edits and moves of sessions, lost and drained replicas.',
                OpsPerSecond,
                Query(rate('replayssm_session_invalidations_total', 'reason'), '{{reason}}'),
                stacked=True,
                width=8,
            ),
            lines(
                'Tokens of histories computed again',
                'Per second, by reason. `not_kept` is what no prefix checkpoint was kept for.',
                Short,
                Query(rate(recomputed, 'reason'), '{{reason}}'),
                stacked=True,
                width=8,
            ),
            lines(
                'Share of known tokens reused',
                'Prompt tokens whose state a worker had, of those and the ones computed again.',
                PercentUnit,
                Query(f'{rate(reused)} / ({rate(reused)} + {rate(recomputed)})', 'reused'),
                width=8,
            ),
            lines(
                'Share of requests with a prefix hit',
                'Requests that found a prefix checkpoint.',
                PercentUnit,
                Query(
                    f'{rate("replayssm_session_prefix_hits_total")} / {rate("replayssm_requests_admitted_total")}',
                    'hits',
                ),
                width=8,
            ),
            lines(
                'Requests resumed elsewhere',
                'Requests given to another worker after the first one was lost, per second, by reason.',
                OpsPerSecond,
                Query(rate('replayssm_requests_resumed_total', 'reason'), '{{reason}}'),
                stacked=True,
                width=8,
            ),
        ),
    )


def _placement() -> Row:
    return Row(
        'Workers',
        (
            lines(
                'Sequences by replica',
                'Of the running batch of each engine, against what the worker runs at once.',
                Short,
                Query(f'replayssm_sequences_running{ENGINE}', '{{replica}}'),
                Query(f'max (replayssm_worker_capacity{ENGINE})', 'capacity of one', dashed=True),
            ),
            lines(
                'Replicas by state',
                'Each replica once, in the state that it reported last.',
                Short,
                Query(f'replayssm_worker_state{ENGINE} == 1', '{{replica}} {{state}}'),
                stacked=True,
            ),
        ),
    )
