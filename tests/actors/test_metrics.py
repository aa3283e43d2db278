from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from actors.messages import EngineStats
from actors.metric_spec import MetricSpec
from actors.metrics import GROUPS, deployment_families, source_families
from replayssm.stats import GpuStats
from tests.actors import metric_values as values

ROOT = Path(__file__).parents[2]
GPU = {'replica': 'a', 'rank': '0', 'node': 'n', 'gpu': '5'}
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def expose(families: list[Metric]) -> list[Metric]:
    """Send families through the text format."""

    class Once(Collector):
        def collect(self) -> list[Metric]:
            return families

    registry = CollectorRegistry()
    registry.register(Once())
    return list(text_string_to_metric_families(generate_latest(registry).decode()))


def series(families: list[Metric]) -> Series:
    samples = [sample for family in expose(families) for sample in family.samples]
    keys = [(sample.name, frozenset(sample.labels.items())) for sample in samples]
    assert [key for key, count in Counter(keys).items() if count > 1] == []
    return dict(zip(keys, (sample.value for sample in samples), strict=True))


def value(found: Series, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


@pytest.mark.parametrize(
    ('name', 'labels', 'expected'),
    [
        ('replayssm_requests_running', {}, 2),
        ('replayssm_requests_queued', {}, 1),
        ('replayssm_requests_admitted_total', {}, 5),
        ('replayssm_requests_rejected_total', {'reason': 'queue_full'}, 4),
        ('replayssm_requests_rejected_total', {'reason': 'loading'}, 0),
        ('replayssm_requests_finished_total', {'reason': 'stop'}, 2),
        ('replayssm_prompt_tokens_total', {}, 60),
        ('replayssm_generation_tokens_total', {}, 40),
        ('replayssm_worker_state', {'replica': 'a', 'state': 'ready'}, 1),
        ('replayssm_worker_state', {'replica': 'a', 'state': 'failed'}, 0),
        ('replayssm_worker_capacity', {'replica': 'a'}, 8),
        ('replayssm_sequences_waiting', {'replica': 'a'}, 1),
        ('replayssm_state_slots', {'replica': 'a'}, 10),
        ('replayssm_state_slots_used', {'replica': 'a'}, 3),
        ('replayssm_kv_blocks_used', {'replica': 'a'}, 44),
        ('replayssm_state_invalidations_total', {'replica': 'a', 'reason': 'preemption'}, 2),
        ('replayssm_state_invalidations_total', {'replica': 'a', 'reason': 'abort'}, 0),
        ('replayssm_recomputed_tokens_total', {'replica': 'a', 'reason': 'preemption'}, 90),
        ('replayssm_state_bytes', {'replica': 'a', 'rank': '0', 'kind': 'checkpoint'}, 4096),
        ('replayssm_state_stock_bytes', {'replica': 'a', 'rank': '0'}, 17408),
        ('replayssm_decode_steps_total', {'replica': 'a', 'rank': '0'}, 100),
        ('replayssm_flushes_total', {'replica': 'a', 'rank': '0'}, 7),
        ('replayssm_records_total', {'replica': 'a', 'rank': '0'}, 130),
        ('replayssm_rejected_records_total', {'replica': 'a', 'rank': '0'}, 30),
        ('replayssm_kv_block_bytes', {'replica': 'a', 'rank': '0'}, 64),
        ('replayssm_kv_blocks_gained', {'replica': 'a'}, 144),
        ('replayssm_windows_total', {'replica': 'a', 'rank': '0'}, 110),
        ('replayssm_replayed_records_total', {'replica': 'a', 'rank': '0'}, 800),
        ('replayssm_state_traffic_bytes_total', {'replica': 'a', 'rank': '0'}, (110 + 7) * 512 + (130 + 800) * 16),
        ('replayssm_state_stock_traffic_bytes_total', {'replica': 'a', 'rank': '0'}, (110 + 130) * 512),
        ('replayssm_accepted_drafts_bucket', {'replica': 'a', 'le': '0.0'}, 5),
        ('replayssm_accepted_drafts_bucket', {'replica': 'a', 'le': '2.0'}, 18),
        ('replayssm_accepted_drafts_bucket', {'replica': 'a', 'le': '+Inf'}, 22),
        ('replayssm_accepted_drafts_count', {'replica': 'a'}, 22),
        ('replayssm_accepted_drafts_sum', {'replica': 'a'}, 31),
        ('replayssm_gpu_memory_used_bytes', GPU, 3),
        ('replayssm_gpu_memory_peak_bytes', GPU, 4),
        ('replayssm_gpu_memory_total_bytes', GPU, 10),
        ('replayssm_gpu_utilization_ratio', GPU, 0.5),
    ],
)
def test_every_number_of_a_deployment_is_exposed(name: str, labels: dict[str, str], expected: float) -> None:
    found = series(deployment_families(values.router()))
    assert value(found, name, model_name='demo', **labels) == expected


def test_histogram_buckets_are_cumulative_and_end_at_infinity() -> None:
    found = series(deployment_families(values.router()))
    name = 'replayssm_time_to_first_token_seconds'
    buckets = {
        le: value(found, f'{name}_bucket', model_name='demo', le=le)
        for le in ('0.001', '0.02', '0.04', '2560.0', '+Inf')
    }
    assert buckets == {'0.001': 1, '0.02': 1, '0.04': 2, '2560.0': 2, '+Inf': 3}
    assert value(found, f'{name}_count', model_name='demo') == 3
    assert value(found, f'{name}_sum', model_name='demo') == pytest.approx(3000.031)


def test_replicas_and_ranks_have_their_own_series() -> None:
    two_ranks = values.engine(values.rank(0), values.rank(1))
    found = series(deployment_families(values.router(values.worker('a', two_ranks), values.worker('b', two_ranks))))
    steps = {labels for name, labels in found if name == 'replayssm_decode_steps_total'}
    assert {tuple(dict(labels)[key] for key in ('replica', 'rank')) for labels in steps} == {
        (replica, rank) for replica in 'ab' for rank in '01'
    }


def test_a_worker_that_loads_has_a_state_and_no_engine() -> None:
    found = series(deployment_families(values.router(values.loading(values.worker()))))
    assert value(found, 'replayssm_worker_state', model_name='demo', replica='a', state='loading') == 1
    assert {name for name, labels in found if 'replica' in dict(labels)} == {
        'replayssm_worker_state',
        'replayssm_worker_capacity',
    }


def test_a_worker_that_left_leaves_nothing() -> None:
    both = series(deployment_families(values.router(values.worker('a'), values.worker('b'))))
    one = series(deployment_families(values.router(values.worker('b'))))
    assert any(('replica', 'a') in labels for _, labels in both)
    assert not any(('replica', 'a') in labels for _, labels in one)


def test_without_replay_bytes_are_known_and_records_are_absent() -> None:
    found = series(deployment_families(values.router(values.worker('a', values.engine(values.stock_rank())))))
    labels = {'model_name': 'demo', 'replica': 'a', 'rank': '0'}
    assert value(found, 'replayssm_state_bytes', **labels, kind='checkpoint') == 16384
    assert value(found, 'replayssm_state_stock_bytes', **labels) == 17408
    assert value(found, 'replayssm_state_bytes', **labels, kind='ring') is None
    assert value(found, 'replayssm_flushes_total', **labels) is None


def test_lmdeploy_families_of_several_engines_are_joined() -> None:
    def engine(running: int) -> EngineStats:
        family = GaugeMetricFamily('lmdeploy_num_requests_running', 'Running.', labels=('model_name',))
        family.add_metric(('demo',), running)
        return values.engine(lmdeploy=(family,))

    found = series(deployment_families(values.router(values.worker('a', engine(1)), values.worker('b', engine(2)))))
    for replica, running in (('a', 1), ('b', 2)):
        assert value(found, 'lmdeploy_num_requests_running', model_name='demo', replica=replica) == running


def test_what_a_gpu_does_not_report_is_absent() -> None:
    silent = GpuStats('n', 1, None, None, None, None)
    found = series(deployment_families(values.router(values.worker('a', values.engine(values.rank(1, silent))))))
    assert not any(('gpu', '1') in labels for _, labels in found)


def test_without_a_gpu_nothing_is_said_about_one() -> None:
    found = series(deployment_families(values.router(values.worker('a', values.engine(values.rank(0, None))))))
    assert not any('gpu' in dict(labels) for _, labels in found)


def test_without_speculation_nothing_is_said_about_drafts() -> None:
    engine = values.engine()
    plain = replace(engine, replay=replace(engine.replay, accepted_drafts=()))
    found = series(deployment_families(values.router(values.worker('a', plain))))
    assert not any(name.startswith('replayssm_accepted_drafts') for name, _ in found)


def test_names_types_and_labels_keep_the_conventions() -> None:
    families = expose(deployment_families(values.router()) + source_families({'x': True}))
    for family in families:
        assert re.fullmatch(r'replayssm_[a-z0-9_]+', family.name)
        assert family.documentation.endswith('.')
        for sample in family.samples:
            assert (family.type == 'counter') == sample.name.endswith('_total')
            assert not {'id', 'request_id', 'session', 'session_id', 'user'} & sample.labels.keys()
    assert {family.name for family in families} == {
        spec.name.removesuffix('_total') for group in GROUPS for spec in group.specs
    }


@pytest.mark.parametrize(('name', 'kind'), [('x_total', 'gauge'), ('x', 'counter'), ('x_total', 'histogram')])
def test_a_counter_and_nothing_else_ends_in_total(name: str, kind: Any) -> None:
    with pytest.raises(ValueError, match=name):
        MetricSpec(name, kind, 'Help.', lambda item: ())


def test_the_reference_page_is_up_to_date() -> None:
    from actors.metrics_reference import reference

    assert (ROOT / 'docs/metrics.md').read_text() == reference(), 'run `make docs`'
