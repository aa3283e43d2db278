"""Which worker a request goes to, and what is known of workers that come and go."""

from __future__ import annotations

from typing import Any

from actors.messages import Arrival, Lease
from actors.policy import Admission
from tests.actors.admissions import admission, arrival, end, new_admission, only, refusal, report


def two_workers(**limits: Any) -> Admission:
    target = admission(max_queued=9, capacity=2, **limits)
    target.report(report('v'), 0.0)
    return target


def visit(target: Admission, session: str, now_s: float) -> str:
    """Let a session run a request to its end; return the worker that ran it."""
    lease = only(target.submit(arrival(f'{session}@{now_s}', session, named=True, prompt_tokens=200), now_s))
    assert isinstance(lease, Lease)
    end(target, lease.request_id, now_s)
    return lease.worker_id


def test_a_session_returns_to_the_worker_that_has_its_state() -> None:
    target = two_workers()
    home = visit(target, 's', 0.0)
    other = ({'w', 'v'} - {home}).pop()
    assert only(target.submit(again('x'), 1.0)).worker_id == home
    assert only(target.submit(arrival('y'), 1.0)).worker_id == other, 'the least work'
    assert only(target.submit(again('z'), 1.0)).worker_id == home


def with_full_home(**limits: Any) -> tuple[Admission, str]:
    """Return an admission where session `s` has its state on a worker that is full, and that worker."""
    target = two_workers(home_wait_s=2.0, **limits)
    home = visit(target, 's', 0.0)
    for number in range(2):
        assert only(target.submit(again(f'fill-{number}'), 0.0)).worker_id == home
    return target, home


def again(request_id: str) -> Arrival:
    return arrival(request_id, 's', named=True, prompt_tokens=300, common_tokens=200)


def test_a_full_home_is_waited_for() -> None:
    target, home = with_full_home(home_queue=1)
    assert target.submit(again('waits'), 0.0) == []
    granted = only(end(target, 'fill-0', 1.0))
    assert (granted.request_id, granted.worker_id) == ('waits', home)


def test_a_full_home_is_not_waited_for_forever() -> None:
    target, home = with_full_home(home_queue=1)
    assert target.submit(again('waits'), 0.0) == []
    assert target.expire(1.9) == []
    assert only(target.expire(2.0)).worker_id != home


def test_few_wait_for_a_full_home() -> None:
    target, home = with_full_home(home_queue=0)
    assert only(target.submit(again('first'), 0.0)).worker_id != home


def test_those_behind_one_that_waits_for_its_home_go_on() -> None:
    target, home = with_full_home(home_queue=1)
    assert target.submit(again('waits'), 0.0) == []
    other = only(target.submit(arrival('other'), 0.0))
    assert isinstance(other, Lease) and other.worker_id != home
    assert target.queued == 1


def test_a_prompt_goes_where_its_longest_prefix_was_computed() -> None:
    target = two_workers()
    first = only(target.submit(arrival('a', prefixes=(1, 2)), 0.0))
    second = only(target.submit(arrival('b', prefixes=(1, 2, 3)), 0.0))
    assert first.worker_id == second.worker_id, 'a shorter prefix is better than none'
    end(target, 'a', 0.0)
    end(target, 'b', 0.0)
    other = ({'w', 'v'} - {first.worker_id}).pop()
    assert only(target.submit(arrival('c', prefixes=(7,)), 0.0)).worker_id in {'w', 'v'}
    target.report(report(first.worker_id, state='failed'), 0.0)
    assert only(target.submit(arrival('d', prefixes=(1, 2, 3)), 0.0)).worker_id == other


def test_a_suspected_worker_gets_nothing_until_it_has_reported_twice() -> None:
    target = admission(capacity=2)
    target.submit(arrival('a'), 0.0)
    target.suspect('w', 'a', 0.0)
    assert refusal(target.submit(arrival('b'), 0.0)).reason == 'no_worker'
    target.report(report(number=1), 0.0)
    assert refusal(target.submit(arrival('b'), 0.0)).reason == 'no_worker', 'this report may have been on its way'
    target.report(report(number=2), 0.0)
    assert only(target.submit(arrival('b'), 0.0)).worker_id == 'w'


def test_a_request_whose_worker_died_waits_for_another() -> None:
    target = admission(capacity=1, resume_wait_s=30.0)
    target.submit(arrival('a'), 0.0)
    target.lose('w', 'a', 1.0)
    assert target.submit(arrival('a', resumed='worker_died'), 1.0) == []
    assert refusal(target.submit(arrival('new'), 1.0)).reason == 'no_worker'
    target.renew('api', [], 25.0)
    assert target.expire(30.0) == []
    assert only(target.report(report('v'), 30.5)).request_id == 'a'


def test_a_request_whose_worker_died_does_not_wait_forever() -> None:
    target = admission(capacity=1, resume_wait_s=30.0)
    target.lose('w', 'none', 1.0)
    target.submit(arrival('a', resumed='worker_died'), 1.0)
    target.renew('api', [], 25.0)
    assert refusal(target.expire(31.0)).reason == 'no_worker'


def test_a_restarted_router_learns_from_workers_what_they_run() -> None:
    target = new_admission()
    target.report(report(capacity=2, running=(Lease('old', 'w', 'api', 's', epoch=7),)), 0.0)
    assert target.running == 1
    lease = only(target.submit(arrival('new', 's', named=True), 0.0))
    assert isinstance(lease, Lease) and lease.epoch == 8, 'epochs go on'
    assert target.submit(arrival('late'), 0.0) == [], 'the worker is full'
    target.report(report(capacity=2, running=(Lease('ended', 'w', 'api', 's'),)), 0.0)
    assert target.running == 2, 'later reports may name what has just ended'


def test_places_come_and_go_with_workers_and_weights() -> None:
    target = two_workers()
    sessions = target._sessions
    homes = {name: visit(target, name, 0.0) for name in 'abcd'}
    assert sessions.stats().by_state == {'running': 0, 'resident': 4, 'cold': 0}
    target.report(report('w', weights_version=1), 1.0)
    on_w = sum(home == 'w' for home in homes.values())
    assert sessions.stats().invalidations_total == ({'weights_reloaded': on_w} if on_w else {})
    target.report(report('v', state='draining'), 1.0)
    target.expire(5.5)
    totals = sessions.stats().invalidations_total
    assert sum(totals.values()) == 4 and set(totals) <= {'weights_reloaded', 'replica_drained'}
    assert sessions.stats().by_state == {'running': 0, 'resident': 0, 'cold': 4}
