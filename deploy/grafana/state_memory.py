"""What the recurrent states occupy and move, against LMDeploy without ReplaySSM."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models.units import BytesIEC, BytesPerSecondIEC, NoUnit, OpsPerSecond, PercentUnit, Short

from deploy.grafana.panels import ENGINE, Query, Row, bars, engine_rate, lines, make_dashboard, number, rank_rate

_HELD = f'sum (replayssm_state_bytes{ENGINE})'
_STOCK = f'sum (replayssm_state_stock_bytes{ENGINE})'


def build() -> Dashboard:
    """Return the dashboard."""
    rows = (_memory(), _traffic(), _drafts(), _invalidations(), _gpus())
    return make_dashboard(
        'replayssm-state-memory',
        'State memory',
        'Bytes of recurrent state held, saved and moved, and what they buy.',
        'en/monitoring.md#state-memory',
        rows,
    )


def _memory() -> Row:
    return Row(
        'Memory',
        (
            number(
                'Saved', 'Stock bytes less bytes held, over all ranks.', BytesIEC, Query(f'{_STOCK} - {_HELD}', 'saved')
            ),
            number(
                'Held, of stock',
                'Share of what LMDeploy without ReplaySSM would hold for the same slots, drafts and checkpoint dtype.',
                PercentUnit,
                Query(f'{_HELD} / {_STOCK}', 'held'),
            ),
            number('Held', 'Bytes allocated for state slots, over all ranks.', BytesIEC, Query(_HELD, 'held')),
            number(
                'Stock',
                'Bytes that LMDeploy without ReplaySSM would allocate for the same slots.',
                BytesIEC,
                Query(_STOCK, 'stock'),
            ),
            number(
                'KV blocks gained',
                'KV-cache blocks that the saved bytes amount to. Where the number of blocks is automatic the engine '
                'has them; where `engine.num_gpu_blocks` is set they are memory left free.',
                NoUnit,
                Query(f'sum (replayssm_kv_blocks_gained{ENGINE})', 'blocks'),
            ),
            number(
                'KV capacity gained',
                'KV blocks gained, as a share of the blocks that there would be without them.',
                PercentUnit,
                Query(
                    f'sum (replayssm_kv_blocks_gained{ENGINE}) / '
                    f'(sum (replayssm_kv_blocks{ENGINE}) - sum (replayssm_kv_blocks_gained{ENGINE}))',
                    'gained',
                ),
            ),
            lines(
                'Bytes held by kind, and stock',
                'One checkpoint and one ring of records per slot stand in for 1 + drafts whole states. The dashed line '
                'is what LMDeploy without ReplaySSM would hold.',
                BytesIEC,
                Query(f'sum by (kind) (replayssm_state_bytes{ENGINE})', '{{kind}}'),
                Query(_STOCK, 'stock', dashed=True),
                stacked=True,
            ),
            bars(
                'Bytes by rank and kind',
                'Now, with the stock bytes of the same rank.',
                BytesIEC,
                Query(f'replayssm_state_bytes{ENGINE}', '{{replica}} rank {{rank}} {{kind}}'),
                Query(f'replayssm_state_stock_bytes{ENGINE}', '{{replica}} rank {{rank}} stock'),
            ),
        ),
    )


def _traffic() -> Row:
    moved, stock = 'replayssm_state_traffic_bytes_total', 'replayssm_state_stock_traffic_bytes_total'
    return Row(
        'Traffic of decode steps',
        (
            lines(
                'State traffic',
                'Bytes of state and records read and written per second, over all ranks, by the layout. The dashed '
                'line is what LMDeploy without ReplaySSM would move for the same windows.',
                BytesPerSecondIEC,
                Query(engine_rate(moved), 'moved'),
                Query(engine_rate(stock), 'stock', dashed=True),
                width=8,
            ),
            lines(
                'State traffic avoided',
                'Stock traffic less the traffic moved.',
                BytesPerSecondIEC,
                Query(f'{engine_rate(stock)} - {engine_rate(moved)}', 'avoided'),
                width=8,
            ),
            lines(
                'Age of a checkpoint',
                'Mean number of committed tokens between a checkpoint and the history, over the sequences decoded: the '
                'records that a window replays.',
                Short,
                Query(
                    f'{rank_rate("replayssm_replayed_records_total")} / {rank_rate("replayssm_windows_total")}',
                    'tokens',
                ),
                width=8,
            ),
            lines(
                'Flushes per window',
                'Share of windows that rewrote their checkpoint. A longer `engine.replay.buffer_len` lowers it.',
                PercentUnit,
                Query(f'{rank_rate("replayssm_flushes_total")} / {rank_rate("replayssm_windows_total")}', 'flushes'),
            ),
            lines(
                'Records',
                'Records appended to rings per second, and those rolled back because their drafts were rejected.',
                OpsPerSecond,
                Query(rank_rate('replayssm_records_total'), 'appended'),
                Query(rank_rate('replayssm_rejected_records_total'), 'rolled back'),
            ),
        ),
    )


def _drafts() -> Row:
    accepted = 'replayssm_accepted_drafts'
    return Row(
        'Drafts',
        (
            lines(
                'Windows by drafts accepted, cumulative',
                'Share of verified windows that accepted at most so many drafts. No data without speculative decoding.',
                PercentUnit,
                Query(
                    f'{engine_rate(accepted + "_bucket", "le")} / ignoring (le) group_left () '
                    f'{engine_rate(accepted + "_count")}',
                    'up to {{le}}',
                ),
            ),
            lines(
                'Drafts accepted per window',
                'Mean. One token more than this is committed per window and sequence.',
                Short,
                Query(f'{engine_rate(accepted + "_sum")} / {engine_rate(accepted + "_count")}', 'accepted'),
            ),
        ),
    )


def _invalidations() -> Row:
    return Row(
        'Invalidations',
        (
            lines(
                'States dropped',
                'Sequences whose KV and state were dropped while their token history was kept, by reason. Preemptions '
                'mean too few KV blocks or state slots.',
                OpsPerSecond,
                Query(engine_rate('replayssm_state_invalidations_total', 'reason'), '{{reason}}'),
                stacked=True,
            ),
            lines(
                'Tokens computed again',
                'Tokens of history that a prefill computes again because of it, per second.',
                Short,
                Query(engine_rate('replayssm_recomputed_tokens_total', 'reason'), '{{reason}}'),
                stacked=True,
            ),
        ),
    )


def _gpus() -> Row:
    return Row(
        'GPUs',
        (
            lines(
                'GPU memory in use and its peak',
                'By all processes, per rank, as NVML reports it. The peak is the most seen since the rank started. No '
                'data without a GPU.',
                BytesIEC,
                Query(f'replayssm_gpu_memory_used_bytes{ENGINE}', 'rank {{rank}} {{node}} GPU {{gpu}}'),
                Query(f'replayssm_gpu_memory_peak_bytes{ENGINE}', 'peak rank {{rank}} {{node}} GPU {{gpu}}'),
                Query(f'max (replayssm_gpu_memory_total_bytes{ENGINE})', 'total', dashed=True),
            ),
            bars(
                'State memory as a share of its GPU',
                'Bytes held for states, as a share of the memory of the GPU that the rank runs on. No data '
                'without a GPU.',
                PercentUnit,
                Query(
                    f'sum by (model_name, replica, rank) (replayssm_state_bytes{ENGINE}) '
                    f'/ on (model_name, replica, rank) group_right () replayssm_gpu_memory_total_bytes{ENGINE}',
                    '{{node}} GPU {{gpu}} rank {{rank}}',
                ),
            ),
        ),
    )
