"""Who may run where, who waits and who is refused; pure: time is an argument, every decision a return value."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from actors.fair_queue import FairQueue
from actors.leases import Leases
from actors.messages import Arrival, Lease, Outcome, Refusal, RefusalReason, WorkerReport
from actors.replicas import Replicas
from actors.sessions import Place, PlaceLoss, SessionTable

Decision = Lease | Refusal

MAX_RETRY_AFTER_S = 600
LOADING_RETRY_AFTER_S = 5
_SMOOTHING = 0.2
"""Weight of the newest request in the moving averages."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of admission; see `actors.config.RouterConfig`."""

    max_queued: int
    lease_timeout_s: float
    worker_timeout_s: float
    max_queued_tokens: int | None = None
    max_kv_share: float | None = None
    block_tokens: int = 64
    home_queue: int = 0
    home_wait_s: float = 0.0
    resume_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What was known of a request when it came; `tokens` are those that it is expected to hold."""

    since_s: float
    home: str | None
    tokens: int


class Admission:
    """The state of admission. Methods that can end somebody's waiting return the decisions; the caller delivers them.

    An owner (an ingress) that stays silent for `lease_timeout_s` loses its leases and its waiting requests, so a
    dead one leaks nothing. Owners name the leases they hold and workers, in their first report, the ones they run, so
    a restarted admission learns of them before it hands out their places a second time.

    Without a ready worker nobody waits, except while a new admission has not heard of any worker yet, and except a
    request whose worker died: its client already has a part of the answer.
    """

    def __init__(self, limits: Limits, sessions: SessionTable, now_s: float) -> None:
        self._limits = limits
        self._started_s = now_s
        self._sessions = sessions
        self._replicas = Replicas(limits.block_tokens, limits.max_kv_share)
        self._leases = Leases(self._replicas, sessions)
        self._queue = FairQueue(limits.max_queued)
        self._waiting: dict[str, _Waiting] = {}
        self._waiting_for: Counter[str] = Counter()
        self._owner_seen_s: dict[str, float] = {}
        self._service_s: float | None = None
        self._output_tokens: float | None = None
        self._places: frozenset[Place] = frozenset()
        self._lost: set[str] = set()
        self._heard_of_workers = False

    @property
    def running(self) -> int:
        """Requests that hold a lease."""
        return len(self._leases)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the requests that wait."""
        return self._queue.tokens

    @property
    def reports(self) -> tuple[WorkerReport, ...]:
        """The last report of every known worker."""
        return self._replicas.reports

    def leased(self, worker_id: str) -> frozenset[str]:
        """Return the requests that hold a lease on a worker."""
        return self._leases.of_worker(worker_id)

    def submit(self, arrival: Arrival, now_s: float) -> list[Decision]:
        """Admit, queue or refuse a request; no decision about it means that it waits."""
        self._owner_seen_s[arrival.owner] = now_s
        # Until a request has ended by itself, prompts alone are what is known.
        tokens = self._replicas.predict_tokens(arrival, self._output_tokens or 0.0)
        waiting = _Waiting(now_s, self._home_of(arrival), tokens)
        if not self._queue:
            worker_id = self._choose(arrival, waiting, now_s)
            if worker_id is not None:
                return [self._leases.grant(arrival, worker_id, tokens, now_s)]
        if not self._may_wait(arrival, waiting, now_s):
            return [self._refuse_unready(arrival.request_id)]
        limit = self._limits.max_queued_tokens
        if limit is not None and self._queue and self._queue.tokens + arrival.prompt_tokens > limit:
            return [self._refuse_full(arrival.request_id, 'too_many_tokens', now_s)]
        displaced = self._queue.push(arrival)
        if displaced is not arrival:
            self._wait(arrival, waiting)
        if displaced is None:
            # Others may wait for a home that this one does not need.
            return self._fill(now_s) if len(self._queue) > 1 else []
        if displaced is not arrival:
            self._stop_waiting(displaced)
        reason: RefusalReason = 'queue_full' if displaced is arrival else 'displaced'
        return [self._refuse_full(displaced.request_id, reason, now_s)]

    def finish(self, outcome: Outcome, now_s: float) -> list[Decision]:
        """End a request, running or waiting; unknown ones are ignored. Its place goes to the next in line."""
        held_s = self._leases.end(outcome.request_id, now_s, outcome)
        if held_s is None:
            self._withdraw(outcome.request_id)
            return self._fill(now_s)
        self._service_s = _average(self._service_s, held_s)
        if outcome.end in ('length', 'stop_token', 'stop_string'):
            self._output_tokens = _average(self._output_tokens, outcome.generation_tokens)
        return self._fill(now_s)

    def cancel(self, request_id: str, now_s: float) -> list[Decision]:
        """End a request without an outcome: its caller has gone, or asks for another place."""
        if self._leases.end(request_id, now_s) is None:
            self._withdraw(request_id)
        return self._fill(now_s)

    def report(self, report: WorkerReport, now_s: float) -> list[Decision]:
        """Take note of a worker's state, and of what it runs if it is new here."""
        if report.worker_id in self._lost:
            return []
        is_new = self._replicas.place(report.worker_id) is None
        self._replicas.report(report, now_s)
        self._heard_of_workers = True
        self._follow_places(now_s)
        if is_new:
            self._leases.recount(report.worker_id)
            self._leases.adopt(report.running, now_s)
        return self._fill(now_s)

    def lose(self, worker_id: str, request_id: str, now_s: float) -> list[Decision]:
        """Take back a lease whose worker turned out not to exist any more, and never believe in that worker again."""
        self._lost.add(worker_id)
        self._replicas.forget(worker_id)
        self._follow_places(now_s)
        self._leases.end(request_id, now_s)
        return self._fill(now_s)

    def suspect(self, worker_id: str, request_id: str, now_s: float) -> list[Decision]:
        """Take back a lease whose worker failed it, and leave that worker alone until it has reported again."""
        self._leases.end(request_id, now_s)
        self._replicas.suspect(worker_id)
        return self._fill(now_s)

    def renew(self, owner: str, held: Iterable[Lease], now_s: float) -> list[Decision]:
        """Take an owner's word for what it holds: adopt leases unknown here, drop old ones it does not name."""
        self._owner_seen_s[owner] = now_s
        named = {lease.request_id: lease for lease in held}
        self._leases.adopt(named.values(), now_s)
        # A lease granted just now may not have reached its owner yet.
        for request_id in self._leases.of_owner(owner, before_s=now_s - self._limits.lease_timeout_s):
            if request_id not in named:
                self._leases.end(request_id, now_s)
        return self._fill(now_s)

    def expire(self, now_s: float) -> list[Decision]:
        """Refuse those whose deadline has passed, and forget silent owners and workers. Call a few times a second."""
        decisions: list[Decision] = []
        for owner, seen_s in list(self._owner_seen_s.items()):
            if now_s - seen_s > self._limits.lease_timeout_s:
                self._forget_owner(owner, now_s)
        for worker_id in self._replicas.silent(now_s - self._limits.worker_timeout_s):
            self._replicas.forget(worker_id)
        self._follow_places(now_s)
        self._sessions.expire(now_s)
        for arrival in list(self._queue):
            waiting = self._waiting[arrival.request_id]
            waited_s = now_s - waiting.since_s
            may_wait = self._may_wait(arrival, waiting, now_s)
            if may_wait and waited_s < arrival.timeout_s:
                continue
            self._withdraw(arrival.request_id)
            if may_wait:
                message = f'The request waited {waited_s:.1f} s for a worker, longer than its deadline.'
                decisions.append(Refusal(arrival.request_id, 'deadline', self._retry_after_s(now_s), message))
            else:
                decisions.append(self._refuse_unready(arrival.request_id))
        return decisions + self._fill(now_s)

    def _home_of(self, arrival: Arrival) -> str | None:
        place = self._sessions.home(arrival.session) if arrival.named else None
        return None if place is None else place.worker_id

    def _follow_places(self, now_s: float) -> None:
        """Give up the state of workers that are gone, are about to go, or have other weights by now."""
        places = self._replicas.places
        gone = self._places - places
        for place in gone:
            now = self._replicas.place(place.worker_id)
            reason: PlaceLoss = (
                'replica_lost' if now is None else 'replica_drained' if now == place else 'weights_reloaded'
            )
            self._sessions.close(place, reason, now_s)
        for place in places - self._places:
            self._sessions.open(place)
        self._places = places
        if gone:
            self._replicas.forget_prefixes()

    def _may_wait(self, arrival: Arrival, waiting: _Waiting, now_s: float) -> bool:
        if self._replicas.is_any_ready:
            return True
        if arrival.resumed is not None and now_s - waiting.since_s < self._limits.resume_wait_s:
            return True
        return not self._heard_of_workers and now_s - self._started_s < self._limits.worker_timeout_s

    def _wait(self, arrival: Arrival, waiting: _Waiting) -> None:
        self._waiting[arrival.request_id] = waiting
        if waiting.home is not None:
            self._waiting_for[waiting.home] += 1

    def _stop_waiting(self, arrival: Arrival) -> _Waiting:
        waiting = self._waiting.pop(arrival.request_id)
        if waiting.home is not None:
            self._waiting_for[waiting.home] -= 1
        return waiting

    def _withdraw(self, request_id: str) -> None:
        arrival = self._queue.remove(request_id)
        if arrival is not None:
            self._stop_waiting(arrival)

    def _forget_owner(self, owner: str, now_s: float) -> None:
        del self._owner_seen_s[owner]
        for request_id in self._leases.of_owner(owner):
            self._leases.end(request_id, now_s)
        for arrival in list(self._queue):
            if arrival.owner == owner:
                self._withdraw(arrival.request_id)

    def _choose(self, arrival: Arrival, waiting: _Waiting, now_s: float) -> str | None:
        """Return the worker that should run a request now: its home, else whoever is best; None to wait."""
        home = waiting.home
        if home is not None and self._replicas.takes(home):
            if self._replicas.has_room(home, waiting.tokens):
                return home
            waiting_with_it = self._waiting_for[home] + (arrival.request_id not in self._waiting)
            if waiting_with_it <= self._limits.home_queue and now_s - waiting.since_s < self._limits.home_wait_s:
                return None
        return self._replicas.choose(arrival, waiting.tokens)

    def _fill(self, now_s: float) -> list[Decision]:
        if not self._queue:
            return []
        granted: list[Decision] = []

        def place(arrival: Arrival) -> str | None:
            return self._choose(arrival, self._waiting[arrival.request_id], now_s)

        progress = True
        while progress:
            progress = False
            for arrival, worker_id in self._queue.take(place):
                waiting = self._stop_waiting(arrival)
                granted.append(self._leases.grant(arrival, worker_id, waiting.tokens, now_s))
                progress = True
        return granted

    def _retry_after_s(self, now_s: float) -> int:
        """Whole seconds until the queue will have drained at the rate seen so far.

        Running requests count with their age: when all of them take longer than those before, so will the queue.
        """
        service_s = max(self._service_s or 0.0, self._leases.mean_age_s(now_s))
        wait_s = service_s * (len(self._queue) + 1) / max(self._replicas.capacity, 1)
        return min(max(math.ceil(wait_s), 1), MAX_RETRY_AFTER_S)

    def _refuse_full(self, request_id: str, reason: RefusalReason, now_s: float) -> Refusal:
        waiting = f'{len(self._queue)} with {self._queue.tokens} prompt tokens are waiting'
        message = f'{len(self._leases)} requests are running and {waiting}, which is the limit.'
        return Refusal(request_id, reason, self._retry_after_s(now_s), message)

    def _refuse_unready(self, request_id: str) -> Refusal:
        states = {report.state: report.message for report in self._replicas.reports}
        coming = [state for state in ('loading', 'reloading') if state in states]
        if coming or not self._heard_of_workers:
            message = f'The model is {coming[0] if coming else "loading"}.'
            return Refusal(request_id, 'loading', LOADING_RETRY_AFTER_S, message)
        detail = states.get('failed', '') or ('It sleeps.' if 'sleeping' in states else '')
        message = f'No worker is available. {detail}'.rstrip()
        return Refusal(request_id, 'no_worker', LOADING_RETRY_AFTER_S, message)


def _average(previous: float | None, newest: float) -> float:
    return newest if previous is None else previous + _SMOOTHING * (newest - previous)
