"""The status page's JSON says what the router's numbers say."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily

from actors.messages import (
    EngineStats,
    Histogram,
    Invalidation,
    RouterStats,
    SessionStats,
    WorkerReport,
)
from actors.ui.routes import OPEN_PATHS, STATE_PATH
from actors.ui.state import ui_state
from replayssm.stats import RankStats, ReplayStats

NONE_YET = Histogram((0.1, 1.0), (0, 0, 0), 0.0)


def stats(*workers: WorkerReport, sessions: SessionStats | None = None) -> RouterStats:
    return RouterStats(
        'demo', 2, 1, 3, {'queue_full': 4}, {'stop': 5}, 60, 70,
        ttft_s=Histogram((0.1, 1.0), (1, 2, 3), 9.0), tpot_s=NONE_YET, e2e_s=NONE_YET,
        sessions=sessions or SessionStats(), workers=workers,
    )  # fmt: skip


def engine(generated: float) -> EngineStats:
    counter = CounterMetricFamily('lmdeploy_generation_tokens', 'Tokens.')
    counter.add_metric([], generated)
    rank = RankStats(0, {'conv': 10, 'checkpoint': 20, 'ring': 30, 'cursor': 1}, 100)
    replay = ReplayStats((rank,), 9, 4, 512, 39, 470, None, {}, {})
    return EngineStats(3, 1, replay, (counter,))


def test_a_replica_with_numbers_and_one_without() -> None:
    loading = WorkerReport('b', 'loading', 8, 'reads its weights')
    state = ui_state(stats(loading, WorkerReport('a', 'ready', 8, engine=engine(123))), 1000.0)
    ready, other = state.replicas
    assert (ready.id, ready.running, ready.state_slots_used, ready.kv_blocks_used) == ('a', 3, 4, 39)
    assert ready.generation_tokens_total == 123
    assert (ready.ranks[0].state_bytes['ring'], ready.ranks[0].stock_bytes) == (30, 100)
    assert (other.state, other.message, other.running, other.ranks) == ('loading', 'reads its weights', None, ())
    assert state.requests.ttft.counts == (1, 2, 3)
    assert (state.model, state.time_s) == ('demo', 1000.0)


def test_the_newest_invalidation_comes_first() -> None:
    recent = (Invalidation(1.0, 'disconnect', 1), Invalidation(2.0, 'replica_lost', 3))
    shown = ui_state(stats(sessions=SessionStats(recent=recent)), 3.0).sessions.recent
    assert [(one.time_s, one.reason, one.count) for one in shown] == [(2.0, 'replica_lost', 3), (1.0, 'disconnect', 1)]


def test_numbers_are_behind_the_key_and_files_are_not() -> None:
    assert STATE_PATH not in OPEN_PATHS
    assert {'/ui', '/ui/app.js', '/ui/style.css', '/ui/icon.svg'} <= OPEN_PATHS
