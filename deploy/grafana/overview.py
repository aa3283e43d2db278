"""Is the service well, is it fast, and what does ReplaySSM save?"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models.units import BytesIEC, NoUnit, OpsPerSecond, PercentUnit, Seconds, Short

from deploy.grafana.panels import ENGINE, MODEL, Panel, Query, Row, lines, make_dashboard, number, quantile, rate


def latency(title: str, description: str, histogram: str) -> Panel:
    """Return the median and the tail of a histogram of seconds."""
    curves = [Query(quantile(q, histogram), name) for q, name in ((0.5, 'p50'), (0.9, 'p90'), (0.99, 'p99'))]
    return lines(title, description, Seconds, *curves, width=8)


def build() -> Dashboard:
    """Return the dashboard."""
    refused = rate('replayssm_requests_rejected_total')
    admitted = rate('replayssm_requests_admitted_total')
    saved = f'sum (replayssm_state_stock_bytes{ENGINE}) - sum (replayssm_state_bytes{ENGINE})'
    now = Row(
        'Now',
        (
            number(
                'Workers ready',
                'Workers that take requests.',
                NoUnit,
                Query('sum (replayssm_worker_state{model_name=~"$model_name", state="ready"})', 'ready'),
            ),
            number(
                'Load',
                'Requests that run, as a share of what the workers run at once.',
                PercentUnit,
                Query(f'sum (replayssm_requests_running{MODEL}) / sum (replayssm_worker_capacity{MODEL})', 'load'),
            ),
            number(
                'Output tokens',
                'Tokens of requests that ended, per second.',
                Short,
                Query(rate('replayssm_generation_tokens_total'), 'tokens/s'),
            ),
            number(
                'First token, p99',
                'From the arrival at the ingress to the first token; of 100 requests, one waits longer.',
                Seconds,
                Query(quantile(0.99, 'replayssm_time_to_first_token_seconds'), 'p99'),
            ),
            number(
                'Refused',
                'Share of requests that were refused: the queue was full, no worker was ready or the deadline passed.',
                PercentUnit,
                Query(f'{refused} / ({refused} + {admitted})', 'refused'),
            ),
            number(
                'State memory saved',
                'Bytes that LMDeploy without ReplaySSM would hold for the same slots, less those held. '
                'Negative where a ring is larger than what it replaces, as without drafts.',
                BytesIEC,
                Query(saved, 'saved'),
            ),
        ),
    )
    requests = Row(
        'Requests',
        (
            lines(
                'Requests ended',
                'By reason: `stop` and `length` are answers, `abort` is a client that hung up, `error` is ours.',
                OpsPerSecond,
                Query(rate('replayssm_requests_finished_total', 'reason'), '{{reason}}'),
                stacked=True,
                width=8,
            ),
            lines(
                'Requests refused',
                'By reason: `queue_full` and `displaced` are overload (429), the others are 503 and 504.',
                OpsPerSecond,
                Query(rate('replayssm_requests_rejected_total', 'reason'), '{{reason}}'),
                stacked=True,
                width=8,
            ),
            lines(
                'Tokens',
                'Prompt and generated tokens of requests that ended, per second.',
                Short,
                Query(rate('replayssm_prompt_tokens_total'), 'prompt'),
                Query(rate('replayssm_generation_tokens_total'), 'generated'),
                width=8,
            ),
            latency(
                'Time to first token',
                'From the arrival at the ingress, so waiting for a worker is in it.',
                'replayssm_time_to_first_token_seconds',
            ),
            latency(
                'Time per output token',
                'Of a request, per token behind its first one.',
                'replayssm_time_per_output_token_seconds',
            ),
            latency(
                'Time of a request',
                'From the arrival at the ingress to the last token.',
                'replayssm_e2e_request_latency_seconds',
            ),
        ),
    )
    capacity = Row(
        'Capacity',
        (
            lines(
                'Requests running and waiting',
                'Against what the workers run at once.',
                Short,
                Query(f'sum (replayssm_requests_running{MODEL})', 'running'),
                Query(f'sum (replayssm_requests_queued{MODEL})', 'waiting'),
                Query(f'sum (replayssm_worker_capacity{MODEL})', 'capacity', dashed=True),
                width=8,
            ),
            lines(
                'Workers by state',
                'A worker that loads takes no requests yet; one that drains takes no more.',
                Short,
                Query(f'sum by (state) (replayssm_worker_state{MODEL})', '{{state}}'),
                stacked=True,
                width=8,
            ),
            lines(
                'GPU memory in use',
                "By all processes, as NVML reports it on the rank's node. No data without a GPU.",
                PercentUnit,
                Query(
                    f'replayssm_gpu_memory_used_bytes{ENGINE} / replayssm_gpu_memory_total_bytes{ENGINE}',
                    '{{node}} GPU {{gpu}}',
                ),
                width=8,
            ),
        ),
    )
    return make_dashboard(
        'replayssm-overview',
        'Overview',
        'Health, speed and savings.',
        'en/monitoring.md#overview',
        (now, requests, capacity),
    )
