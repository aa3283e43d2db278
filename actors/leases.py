"""Who holds which worker, kept in step with the workers' load and the sessions' runs; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actors.messages import Arrival, Lease, Outcome
from actors.replicas import Replicas
from actors.sessions import SessionTable


@dataclass(slots=True)
class _Held:
    lease: Lease
    since_s: float


class Leases:
    """All leases. Whatever ends one, its worker's load and its session's run end with it."""

    def __init__(self, replicas: Replicas, sessions: SessionTable) -> None:
        self._replicas = replicas
        self._sessions = sessions
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, arrival: Arrival, worker_id: str, tokens: int, now_s: float) -> Lease:
        """Give a request a lease on a known worker and its session the next epoch."""
        epoch = 0
        if arrival.named:
            place = self._replicas.place(worker_id)
            assert place is not None
            prompt, common = arrival.prompt_tokens, arrival.common_tokens
            epoch = self._sessions.admit(arrival.session, place, prompt, common, now_s)
        lease = Lease(arrival.request_id, worker_id, arrival.owner, arrival.session, epoch, tokens)
        self._held[arrival.request_id] = _Held(lease, now_s)
        self._replicas.add(lease, arrival.prefixes)
        return lease

    def adopt(self, leases: Iterable[Lease], now_s: float) -> None:
        """Believe in leases that somebody else granted; known ones are left as they are."""
        for lease in leases:
            if lease.request_id not in self._held:
                self._held[lease.request_id] = _Held(lease, now_s)
                self._replicas.add(lease)
                place = self._replicas.place(lease.worker_id)
                if lease.epoch and place is not None:
                    self._sessions.adopt(lease.session, lease.epoch, place, now_s)

    def recount(self, worker_id: str) -> None:
        """Count the leases of a worker that has just become known."""
        for held in self._held.values():
            if held.lease.worker_id == worker_id:
                self._replicas.add(held.lease)

    def end(self, request_id: str, now_s: float, outcome: Outcome | None = None) -> float | None:
        """End a lease, return for how many seconds it was held; None for one that is not known.

        Args:
            outcome: What came of the request; None when it will be tried again or nobody is left who could say.
        """
        held = self._held.pop(request_id, None)
        if held is None:
            return None
        lease = held.lease
        self._replicas.remove(lease)
        if lease.epoch:
            end, cached = (None, None) if outcome is None else (outcome.end, outcome.cached_tokens)
            self._sessions.finish(lease.session, lease.epoch, end, cached, now_s)
        return now_s - held.since_s

    def of_worker(self, worker_id: str) -> frozenset[str]:
        """Return the requests that hold a lease on a worker."""
        return frozenset(request_id for request_id, held in self._held.items() if held.lease.worker_id == worker_id)

    def of_owner(self, owner: str, before_s: float | None = None) -> list[str]:
        """Return the requests of an ingress, those granted before a time if it is given."""
        return [
            request_id
            for request_id, held in self._held.items()
            if held.lease.owner == owner and (before_s is None or held.since_s < before_s)
        ]

    def mean_age_s(self, now_s: float) -> float:
        """Return for how long the leases have been held on average; 0 without any."""
        return sum(now_s - held.since_s for held in self._held.values()) / max(len(self._held), 1)
