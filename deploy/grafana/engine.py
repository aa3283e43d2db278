"""Batches, caches and phases of LMDeploy's engine."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models.units import OpsPerSecond, PercentUnit, Seconds, Short

from deploy.grafana.panels import ENGINE, Panel, Query, Row, engine_rate, lines, make_dashboard, quantile, rank_rate


def build() -> Dashboard:
    """Return the dashboard."""
    return make_dashboard(
        'replayssm-engine',
        'Engine',
        'Batches, caches and phases of the engines.',
        'en/monitoring.md#engine',
        (_batch(), _caches(), _phases()),
    )


def _used(name: str, total: str, title: str, description: str) -> Panel:
    return lines(title, description, PercentUnit, Query(f'{name}{ENGINE} / {total}{ENGINE}', '{{replica}}'), width=8)


def _batch() -> Row:
    windows = rank_rate('replayssm_windows_total')
    return Row(
        'Batch',
        (
            lines(
                'Sequences running',
                'In the batch of each engine.',
                Short,
                Query(f'replayssm_sequences_running{ENGINE}', '{{replica}}'),
                width=8,
            ),
            lines(
                'Sequences waiting',
                'Inside each engine; the router lets in no more than the batch holds, so this is short of memory.',
                Short,
                Query(f'replayssm_sequences_waiting{ENGINE}', '{{replica}}'),
                width=8,
            ),
            lines(
                'Decode steps',
                'Decode and verify forwards per second.',
                OpsPerSecond,
                Query(rank_rate('replayssm_decode_steps_total'), 'steps'),
                width=8,
            ),
            lines(
                'Sequences per decode step',
                'Mean size of the batch.',
                Short,
                Query(f'{windows} / {rank_rate("replayssm_decode_steps_total")}', 'sequences'),
                width=8,
            ),
            lines(
                'Tokens committed per window',
                '1 without drafts, up to 1 + drafts with them.',
                Short,
                Query(
                    f'({rank_rate("replayssm_records_total")} - {rank_rate("replayssm_rejected_records_total")})'
                    f' / {windows}',
                    'tokens',
                ),
                width=8,
            ),
            lines(
                'Tokens generated',
                'By the engines per second, as they are generated.',
                Short,
                Query(engine_rate('lmdeploy_generation_tokens_total', 'replica'), '{{replica}}'),
                stacked=True,
                width=8,
            ),
        ),
    )


def _caches() -> Row:
    return Row(
        'Caches',
        (
            _used(
                'replayssm_kv_blocks_used',
                'replayssm_kv_blocks',
                'KV cache in use',
                'Share of blocks that sequences hold. At 100 % the engine preempts.',
            ),
            _used(
                'replayssm_state_slots_used',
                'replayssm_state_slots',
                'State slots in use',
                'Share of slots that sequences or prefix checkpoints hold.',
            ),
            lines(
                'Prompt tokens from the prefix cache',
                'Share of the prompt tokens of requests that ended.',
                PercentUnit,
                Query(
                    f'{engine_rate("lmdeploy_cached_tokens_total")} / {engine_rate("lmdeploy_prompt_tokens_total")}',
                    'cached',
                ),
                width=8,
            ),
        ),
    )


def _phases() -> Row:
    def phase(title: str, description: str, histogram: str) -> Panel:
        curves = [Query(quantile(q, histogram, ENGINE), name) for q, name in ((0.5, 'p50'), (0.99, 'p99'))]
        return lines(title, description, Seconds, *curves, width=8)

    return Row(
        'Phases of a request in the engine',
        (
            phase('Queue', 'Time in the engine until the first forward.', 'lmdeploy_request_queue_time_seconds'),
            phase('Prefill', 'Time until the first token.', 'lmdeploy_request_prefill_time_seconds'),
            phase('Decode', 'Time from the first token to the last.', 'lmdeploy_request_decode_time_seconds'),
        ),
    )
