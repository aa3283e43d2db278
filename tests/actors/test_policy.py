"""Admission as a pure function of time: leases, queue, refusals, expiry."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.fair_queue import FairQueue
from actors.messages import Lease, Priority, WorkerReport
from actors.policy import LOADING_RETRY_AFTER_S
from tests.actors.admissions import admission, arrival, end, engine, fill, new_admission, only, refusal, report


def test_runs_then_queues_then_refuses() -> None:
    target = admission(max_queued=2, capacity=2)
    assert only(target.submit(arrival('a'), 0.0)) == Lease('a', 'w', 'api', 'a')
    assert isinstance(only(target.submit(arrival('b'), 0.0)), Lease)
    assert target.submit(arrival('c'), 0.0) == []
    assert target.submit(arrival('d'), 0.0) == []
    assert refusal(target.submit(arrival('e'), 0.0)).reason == 'queue_full'
    assert (target.running, target.queued) == (2, 2)


def test_a_released_place_goes_to_the_next_in_line() -> None:
    target = admission()
    fill(target, 4)
    assert only(end(target, 'fill-0', 1.0)).request_id == 'fill-2'
    assert end(target, 'fill-0', 1.0) == [], 'a second release must not free a second place'
    assert (target.running, target.queued) == (2, 1)


def test_a_waiting_request_can_be_withdrawn() -> None:
    target = admission()
    fill(target, 4)
    assert target.cancel('fill-2', 1.0) == []
    assert only(end(target, 'fill-0', 1.0)).request_id == 'fill-3'


@pytest.mark.parametrize(
    ('reports', 'reason'),
    [
        pytest.param([report(state='loading')], 'loading', id='loading'),
        pytest.param([report(state='reloading')], 'loading', id='reloading'),
        pytest.param([report(state='sleeping')], 'no_worker', id='sleeping'),
        pytest.param([report(state='failed')], 'no_worker', id='failed'),
        pytest.param([report(state='draining')], 'no_worker', id='draining'),
        pytest.param([report('a', state='failed'), report('b', state='loading')], 'loading', id='one-loads'),
    ],
)
def test_without_a_ready_worker_nothing_waits(reports: list[WorkerReport], reason: str) -> None:
    target = new_admission()
    for item in reports:
        target.report(item, 0.0)
    refused = refusal(target.submit(arrival('a'), 0.0))
    assert (refused.reason, refused.retry_after_s) == (reason, LOADING_RETRY_AFTER_S)


def test_a_new_router_waits_for_the_first_report() -> None:
    target = new_admission()
    assert target.submit(arrival('early'), 1.0) == []
    assert only(target.report(report(), 2.0)) == Lease('early', 'w', 'api', 'early')


def test_a_new_router_does_not_wait_for_long() -> None:
    target = new_admission()
    target.submit(arrival('early'), 1.0)
    assert refusal(target.expire(5.0)).reason == 'loading'
    assert refusal(target.submit(arrival('late'), 5.0)).reason == 'loading'


def test_nobody_waits_for_a_worker_that_is_lost() -> None:
    target = admission(capacity=1)
    fill(target, 2)
    target.lose('w', 'fill-0', 1.0)
    assert refusal(target.expire(1.0)).reason == 'no_worker'
    assert (target.running, target.queued) == (0, 0)


def test_a_lost_worker_is_not_believed_in_again() -> None:
    target = admission(capacity=1)
    target.lose('w', 'none', 1.0)
    target.report(report(), 2.0)
    assert refusal(target.submit(arrival('a'), 2.0)).reason == 'no_worker'
    target.report(report('v'), 3.0)
    assert only(target.submit(arrival('b'), 3.0)) == Lease('b', 'v', 'api', 'b')


def test_the_least_loaded_worker_is_chosen() -> None:
    target = admission(capacity=2)
    target.report(report('v', capacity=3), 0.0)
    leases = [only(target.submit(arrival(str(index)), 0.0)) for index in range(5)]
    assert Counter(lease.worker_id for lease in leases if isinstance(lease, Lease)) == {'w': 2, 'v': 3}
    assert target.submit(arrival('late'), 0.0) == []


@pytest.mark.parametrize('service_s', [0.2, 4.0, 30.0])
def test_retry_after_grows_with_the_queue_and_follows_the_service_rate(service_s: float) -> None:
    seen = []
    for max_queued in (0, 4, 16):
        target = admission(max_queued=max_queued, capacity=1)
        target.submit(arrival('first'), 0.0)
        end(target, 'first', service_s)
        fill(target, 1 + max_queued, service_s)
        seen.append(refusal(target.submit(arrival('late'), service_s)).retry_after_s)
    expected = [max(1, round(service_s * (queued + 1))) for queued in (0, 4, 16)]
    assert seen == sorted(seen)
    assert seen == pytest.approx(expected, abs=1)


def test_retry_after_counts_requests_that_run_longer_than_usual() -> None:
    target = admission(max_queued=0, capacity=1)
    target.submit(arrival('quick'), 0.0)
    end(target, 'quick', 1.0)
    target.submit(arrival('slow'), 1.0)
    assert refusal(target.submit(arrival('a'), 1.0)).retry_after_s == 1
    assert refusal(target.submit(arrival('b'), 41.0)).retry_after_s == 40


def test_a_hot_session_displaces_only_itself() -> None:
    target = admission(max_queued=4, capacity=1)
    target.submit(arrival('running'), 0.0)
    for index in range(4):
        target.submit(arrival(f'hot-{index}', 'hot'), 0.0)
    displaced = refusal(target.submit(arrival('cold', 'cold'), 0.0))
    assert (displaced.request_id, displaced.reason) == ('hot-3', 'displaced')
    assert refusal(target.submit(arrival('hot-4', 'hot'), 0.0)).request_id == 'hot-4'
    order = []
    running = 'running'
    while target.queued:
        running = only(end(target, running, 1.0)).request_id
        order.append(running)
    assert order == ['hot-0', 'cold', 'hot-1', 'hot-2'], 'sessions take turns'


def test_a_deadline_passes_in_the_queue() -> None:
    target = admission(capacity=1)
    fill(target, 1)
    target.submit(arrival('waits', timeout_s=3.0), 0.0)
    target.report(report(capacity=1), 2.0)
    assert target.expire(2.9) == []
    expired = refusal(target.expire(3.0))
    assert (expired.request_id, expired.reason) == ('waits', 'deadline')
    assert end(target, 'fill-0', 3.0) == [], 'an expired request must never run'


def test_a_silent_owner_loses_its_leases_and_its_place_in_line() -> None:
    target = admission(max_queued=4, capacity=1)
    target.submit(arrival('dead-runs', owner='dead'), 0.0)
    target.submit(arrival('dead-waits', owner='dead'), 0.0)
    target.submit(arrival('alive-waits', owner='alive'), 0.0)
    target.renew('alive', [], 9.0)
    target.report(report(capacity=1), 9.0)
    assert target.expire(9.9) == []
    target.report(report(capacity=1), 10.1)
    assert only(target.expire(10.1)).request_id == 'alive-waits'
    assert (target.running, target.queued) == (1, 0)


def test_a_silent_worker_gets_nothing() -> None:
    target = admission()
    target.expire(5.1)
    assert refusal(target.submit(arrival('a'), 5.1)).reason == 'no_worker'


def test_a_restarted_router_adopts_leases() -> None:
    target = admission(capacity=1)
    target.renew('api', [Lease('old', 'w', 'api', 's')], 0.0)
    assert target.submit(arrival('new'), 0.0) == [], 'the worker is full'
    assert only(end(target, 'old', 1.0)).request_id == 'new'


def test_leases_that_their_owner_does_not_name_are_dropped() -> None:
    target = admission(capacity=1)
    fill(target, 1)
    target.renew('api', [], 5.0)
    assert target.running == 1, 'it may be on its way'
    target.renew('api', [], 10.1)
    assert target.running == 0


@given(st.lists(st.tuples(st.sampled_from('abc'), st.booleans()), max_size=60), st.integers(0, 5))
def test_the_queue_loses_nothing(steps: list[tuple[str, bool]], limit: int) -> None:
    queue = FairQueue(limit)
    inside: set[str] = set()
    for number, (session, push) in enumerate(steps):
        if push:
            request = arrival(str(number), session)
            out = queue.push(request)
            inside.add(request.request_id)
            inside.discard(out.request_id if out else '')
            if out is not None and out is not request:
                lines = Counter(item.session for item in queue)
                assert lines[out.session] >= lines[session], 'only a longer line gives way'
        else:
            taken = {request.request_id for request, _ in queue.take(lambda request: request.session == 'a' or None)}
            inside -= taken
        assert {item.request_id for item in queue} == inside
        assert len(queue) == len(inside) <= limit


def test_higher_priorities_go_first_and_displace_lower_ones() -> None:
    target = admission(max_queued=2, capacity=1)
    fill(target, 1)
    priorities: list[Priority] = ['low', 'normal', 'high']
    for priority in priorities[:2]:
        target.submit(arrival(priority, priority=priority), 0.0)
    displaced = refusal(target.submit(arrival('high', priority='high'), 0.0))
    assert (displaced.request_id, displaced.reason) == ('low', 'displaced')
    assert refusal(target.submit(arrival('late', priority='low'), 0.0)).reason == 'queue_full'
    assert only(end(target, 'fill-0', 1.0)).request_id == 'high'
    assert only(end(target, 'high', 1.0)).request_id == 'normal'


def test_tokens_that_wait_are_limited() -> None:
    target = admission(max_queued=9, capacity=1, max_queued_tokens=100)
    fill(target, 1)
    assert target.submit(arrival('long', prompt_tokens=500), 0.0) == [], 'a prompt longer than the limit may wait alone'
    assert refusal(target.submit(arrival('next', prompt_tokens=1), 0.0)).reason == 'too_many_tokens'
    end(target, 'fill-0', 1.0)
    assert target.submit(arrival('next', prompt_tokens=60), 1.0) == []
    assert target.queued_tokens == 60
    assert refusal(target.submit(arrival('last', prompt_tokens=41), 1.0)).reason == 'too_many_tokens'


def test_predicted_kv_blocks_are_limited_by_those_that_the_engine_has() -> None:
    target = admission(max_queued=9, capacity=9, block_tokens=10, max_kv_share=1.0)
    target.report(report(capacity=9, engine=engine(kv_blocks=10)), 0.0)
    assert only(target.submit(arrival('huge', prompt_tokens=1000), 0.0)).worker_id == 'w', (
        'the engine says what is wrong'
    )
    end(target, 'huge', 0.0)
    assert only(target.submit(arrival('a', prompt_tokens=41), 0.0)).tokens == 50, 'whole blocks'
    assert only(target.submit(arrival('b', prompt_tokens=50), 0.0))
    assert target.submit(arrival('c', prompt_tokens=1), 0.0) == []
    assert only(end(target, 'a', 1.0)).request_id == 'c'


def test_output_is_predicted_from_what_others_generated() -> None:
    target = admission(capacity=9, block_tokens=1)
    assert only(target.submit(arrival('a', prompt_tokens=5, max_new_tokens=1000), 0.0)).tokens == 5
    end(target, 'a', 1.0, generated=100)
    assert only(target.submit(arrival('b', prompt_tokens=5, max_new_tokens=1000), 1.0)).tokens == 105
    assert only(target.submit(arrival('c', prompt_tokens=5, max_new_tokens=7), 1.0)).tokens == 12


def test_state_slots_are_limited_by_those_that_the_engine_has() -> None:
    target = admission(capacity=9)
    target.report(report(capacity=9, engine=engine(state_slots=2)), 0.0)
    fill(target, 3)
    assert (target.running, target.queued) == (2, 1)
