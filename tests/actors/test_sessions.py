"""The session table against a model that keeps everything and counts by looking."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from actors.messages import EndReason
from actors.sessions import InvalidationReason, Place, PlaceLoss, SessionLimits, SessionTable, pack, unpack

A, B = Place('a', 0), Place('b', 0)
PROMPT = 100


def table(
    max_sessions: int = 100, max_tokens: int = 10_000, ttl_s: float = 60.0, keeps_state: bool = True
) -> SessionTable:
    made = SessionTable(SessionLimits(max_sessions, max_tokens, ttl_s, keeps_state))
    for place in (A, B):
        made.open(place)
    return made


def run(
    target: SessionTable,
    name: str = 's',
    place: Place = A,
    common: int = 0,
    end: EndReason = 'length',
    cached: int = 0,
    now_s: float = 0.0,
) -> int:
    """Let a session run one request to its end; return its epoch."""
    epoch = target.admit(name, place, PROMPT, common, now_s)
    target.remember(name, epoch, pack(range(PROMPT + epoch)), now_s)
    target.finish(name, epoch, end, cached, now_s)
    return epoch


def test_token_ids_survive_packing() -> None:
    assert unpack(pack([0, 5, 248_319])) == [0, 5, 248_319]
    assert unpack(b'') == []


def test_a_session_has_its_state_where_it_ran_last() -> None:
    target = table()
    assert target.home('s') is None and target.state('s') is None
    epoch = target.admit('s', A, PROMPT, 0, 0.0)
    assert target.state('s') == 'running'
    target.finish('s', epoch, 'length', 0, 0.0)
    assert (target.home('s'), target.state('s')) == (A, 'resident')


def test_without_prefix_checkpoints_nothing_stays() -> None:
    target = table(keeps_state=False)
    run(target)
    assert (target.home('s'), target.state('s')) == (None, 'cold')
    assert unpack(target.history('s')) == list(range(PROMPT + 1)), 'the history stays all the same'


@pytest.mark.parametrize('end', [reason for reason in get_args(EndReason) if reason != 'length'])
def test_an_early_stop_gives_up_live_state(end: EndReason) -> None:
    target = table()
    first = run(target, end=end)
    assert target.stats().invalidations_total == {end: 1}
    assert run(target, common=PROMPT) == first + 1, 'the next request is of a later epoch'


def test_an_answer_that_ran_to_its_limit_gives_up_nothing() -> None:
    target = table()
    run(target)
    assert target.stats().invalidations_total == {}


def test_an_edited_history_keeps_the_state_before_the_edit() -> None:
    target = table()
    run(target)
    target.admit('s', A, PROMPT, 40, 1.0)
    assert target.stats().invalidations_total == {'edited': 1}
    assert target.home('s') == A
    other = table()
    run(other)
    other.admit('s', A, PROMPT, 0, 1.0)
    assert other.home('s') is None, 'nothing is left in common'


def test_state_does_not_move_with_its_session() -> None:
    target = table()
    run(target, place=A)
    run(target, place=B, common=PROMPT, cached=0)
    stats = target.stats()
    assert stats.invalidations_total == {'moved': 1}
    assert stats.recomputed_tokens_total == {'not_kept': 0, 'moved': PROMPT}
    assert target.home('s') == B


def test_only_what_the_session_had_before_counts_as_recomputed() -> None:
    target = table()
    run(target)
    run(target, common=90, cached=64)
    assert target.stats().recomputed_tokens_total['not_kept'] == 0
    assert target.stats().recomputed_tokens_total['edited'] == 90 - 64


@pytest.mark.parametrize('reason', get_args(PlaceLoss))
def test_a_lost_place_takes_all_its_state_along(reason: PlaceLoss) -> None:
    target = table()
    run(target, 'idle')
    run(target, 'elsewhere', B)
    running = target.admit('runs', A, PROMPT, 0, 0.0)
    target.close(A, reason, 1.0)
    stats = target.stats()
    assert stats.invalidations_total == {reason: 2}
    assert [(item.time_s, item.reason, item.count) for item in stats.recent] == [(1.0, reason, 2)]
    assert target.home('idle') is None and target.home('elsewhere') == B
    target.finish('runs', running, None, 0, 1.0)
    assert target.home('runs') is None, 'what ran there left nothing'
    run(target, 'idle', B, common=PROMPT)
    assert target.stats().recomputed_tokens_total[reason] == PROMPT


def test_what_is_reported_late_does_not_undo_what_came_after() -> None:
    target = table()
    first = target.admit('s', A, PROMPT, 0, 0.0)
    second = target.admit('s', B, PROMPT, 0, 0.0)
    target.remember('s', second, pack([2]), 1.0)
    target.finish('s', second, 'length', 0, 1.0)
    target.remember('s', first, pack([1]), 2.0)
    target.finish('s', first, 'disconnect', 0, 2.0)
    assert unpack(target.history('s')) == [2]
    assert target.home('s') == B


def test_a_request_that_is_tried_again_has_lost_nothing_yet() -> None:
    target = table()
    epoch = target.admit('s', A, PROMPT, 0, 0.0)
    target.finish('s', epoch, None, None, 0.0)
    assert target.stats().invalidations_total == {}
    assert target.state('s') == 'cold'


def test_silent_sessions_expire_and_running_ones_do_not() -> None:
    target = table(ttl_s=60.0)
    run(target, 'old', now_s=0.0)
    target.admit('runs', A, PROMPT, 0, 1.0)
    run(target, 'young', now_s=50.0)
    target.expire(61.5)
    assert [target.state(name) for name in ('old', 'runs', 'young')] == [None, 'running', 'resident']
    assert target.stats().invalidations_total == {'expired': 1}


def test_a_table_of_running_sessions_alone_is_left_as_it_is() -> None:
    target = table(max_sessions=2, ttl_s=1.0)
    epochs = {name: target.admit(name, A, PROMPT, 0, 0.0) for name in 'abc'}
    target.expire(100.0)
    assert len(target) == 3
    for name, epoch in epochs.items():
        target.finish(name, epoch, 'length', 0, 100.0)
    target.admit('d', A, PROMPT, 0, 100.0)
    assert len(target) == 2


def test_the_least_recently_used_sessions_make_room() -> None:
    target = table(max_sessions=2)
    for name in 'ab':
        run(target, name)
    run(target, 'a', common=PROMPT)
    run(target, 'c')
    assert [target.state(name) for name in 'abc'] == ['resident', None, 'resident']
    assert target.stats().invalidations_total == {'displaced': 1}


def test_histories_are_bounded_together() -> None:
    target = table(max_tokens=250)
    for name in 'abc':
        run(target, name)
    assert [target.state(name) for name in 'abc'] == [None, 'resident', 'resident']


def test_a_new_table_learns_of_running_requests() -> None:
    target = table()
    target.adopt('s', 7, A, 0.0)
    assert target.state('s') == 'running'
    assert target.admit('s', A, PROMPT, 0, 0.0) == 8
    target.finish('s', 7, 'length', 0, 0.0)
    target.finish('s', 8, 'length', 0, 0.0)
    assert target.state('s') == 'resident'


@dataclass
class Remembered:
    """A session as the model knows it."""

    history: list[int] = field(default_factory=list)
    history_epoch: int = 0
    place: Place | None = None
    position: int = 0
    place_epoch: int = 0
    epoch: int = 0
    running: dict[int, Place] = field(default_factory=dict)
    used_s: float = 0.0


class Sessions(RuleBasedStateMachine):
    """Any order of admissions, ends, losses, reloads and silence."""

    runs: Bundle[tuple[str, int]] = Bundle('runs')
    TTL_S = 50.0

    @initialize()
    def start(self) -> None:
        self.table = SessionTable(SessionLimits(1000, 1_000_000, self.TTL_S, keeps_state=True))
        self.now_s = 0.0
        self.up = {'a': Place('a', 0), 'b': Place('b', 0)}
        for place in self.up.values():
            self.table.open(place)
        self.model: dict[str, Remembered] = {}
        self.given_up: Counter[str] = Counter()

    def resident(self, session: Remembered) -> bool:
        return session.place in self.up.values() and session.position > 0

    @rule(target=runs, name=st.sampled_from('stu'), worker=st.sampled_from('ab'), common=st.integers(0, 60))
    def admit(self, name: str, worker: str, common: int) -> tuple[str, int]:
        session = self.model.setdefault(name, Remembered())
        place = self.up[worker]
        common = min(common, len(session.history))
        if self.resident(session):
            if session.place != place:
                self.given_up['moved'] += 1
                session.place = None
            elif session.position > common:
                self.given_up['edited'] += 1
                session.position = common
        session.epoch += 1
        session.running[session.epoch] = place
        session.used_s = self.now_s
        assert self.table.admit(name, place, 60, common, self.now_s) == session.epoch
        return name, session.epoch

    @rule(which=runs, end=st.sampled_from([*get_args(EndReason), None]), cached=st.sampled_from([None, 0, 30]))
    def finish(self, which: tuple[str, int], end: EndReason | None, cached: int | None) -> None:
        name, epoch = which
        self.table.finish(name, epoch, end, cached, self.now_s)
        session = self.model.get(name)
        if session is None or epoch not in session.running:
            return
        place = session.running.pop(epoch)
        session.used_s = self.now_s
        if end not in ('length', None):
            self.given_up[str(end)] += 1
        if cached is not None and epoch > session.place_epoch and place in self.up.values():
            session.place, session.position, session.place_epoch = place, 60, epoch

    @rule(which=runs, length=st.integers(1, 80))
    def remember(self, which: tuple[str, int], length: int) -> None:
        name, epoch = which
        session = self.model.get(name)
        if session is None:
            return
        history = list(range(length))
        self.table.remember(name, epoch, pack(history), self.now_s)
        session.used_s = self.now_s
        session.epoch = max(session.epoch, epoch)
        if epoch > session.history_epoch:
            session.history, session.history_epoch = history, epoch

    @rule(worker=st.sampled_from('ab'), reason=st.sampled_from(get_args(PlaceLoss)))
    def lose(self, worker: str, reason: PlaceLoss) -> None:
        place = self.up[worker]
        lost = sum(
            self.resident(session) and session.place == place and not session.running for session in self.model.values()
        )
        lost += sum(place in session.running.values() for session in self.model.values())
        self.table.close(place, reason, self.now_s)
        self.up[worker] = Place(worker, place.weights_version + 1)
        self.table.open(self.up[worker])
        if lost:
            self.given_up[reason] += lost

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.table.expire(self.now_s)
        for name, session in list(self.model.items()):
            if self.now_s - session.used_s > self.TTL_S:
                if session.running:
                    session.used_s = self.now_s
                    continue
                self.given_up['expired'] += self.resident(session)
                del self.model[name]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, 'table'):
            return
        states: Counter[str] = Counter({'running': 0, 'resident': 0, 'cold': 0})
        for name, session in self.model.items():
            resident = self.resident(session)
            assert self.table.home(name) == (session.place if resident else None)
            assert unpack(self.table.history(name)) == session.history
            state = 'running' if session.running else 'resident' if resident else 'cold'
            assert self.table.state(name) == state
            states[state] += 1
        stats = self.table.stats()
        assert stats.by_state == states
        assert stats.invalidations_total == +self.given_up
        assert set(stats.invalidations_total) <= set(get_args(InvalidationReason))


Sessions.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSessions = Sessions.TestCase
