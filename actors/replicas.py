"""The workers as admission sees them: what each can take, what it runs, and which one a request should go to; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actors.messages import Arrival, Lease, WorkerReport
from actors.prefix_index import PrefixIndex
from actors.sessions import Place

_PREFIXES = 100_000


@dataclass(slots=True)
class _Worker:
    """A worker with what admission has given it.

    Attributes:
        running, tokens: Leases, and their predicted prompt and output tokens.
        believe_from: Number of the first report that counts again after a failure that the worker did not report.
    """

    report: WorkerReport
    seen_s: float
    running: int = 0
    tokens: int = 0
    believe_from: int = 0

    @property
    def place(self) -> Place:
        return Place(self.report.worker_id, self.report.weights_version)

    @property
    def is_ready(self) -> bool:
        return self.report.state == 'ready' and self.report.number >= self.believe_from


class Replicas:
    """The workers that are known.

    Args:
        block_tokens: Tokens of one KV block.
        max_kv_share: Predicted tokens of a worker's requests over the tokens of its KV blocks; None for no limit.
    """

    def __init__(self, block_tokens: int, max_kv_share: float | None) -> None:
        self._block_tokens = block_tokens
        self._max_kv_share = max_kv_share
        self._workers: dict[str, _Worker] = {}
        self._prefixes: PrefixIndex[Place] = PrefixIndex(_PREFIXES)

    @property
    def reports(self) -> tuple[WorkerReport, ...]:
        """The last report of every known worker."""
        return tuple(worker.report for worker in self._workers.values())

    @property
    def is_any_ready(self) -> bool:
        """Whether some worker takes requests, now or later."""
        return any(worker.is_ready for worker in self._workers.values())

    @property
    def capacity(self) -> int:
        """Requests that all ready workers together may run."""
        return sum(worker.report.capacity for worker in self._workers.values() if worker.is_ready)

    @property
    def places(self) -> frozenset[Place]:
        """Where state can be: every worker that is up, unless it is about to go."""
        return frozenset(worker.place for worker in self._workers.values() if worker.report.state != 'draining')

    def report(self, report: WorkerReport, now_s: float) -> None:
        """Take note of a worker's state."""
        worker = self._workers.get(report.worker_id)
        if worker is None:
            self._workers[report.worker_id] = _Worker(report, now_s)
            return
        worker.report, worker.seen_s = report, now_s

    def suspect(self, worker_id: str) -> None:
        """Give a worker nothing until it has reported twice: the first report may have been on its way already."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.believe_from = worker.report.number + 2

    def forget(self, worker_id: str) -> None:
        """Forget a worker; its leases are the caller's business."""
        self._workers.pop(worker_id, None)

    def silent(self, before_s: float) -> list[str]:
        """Return the workers that have not reported since a time."""
        return [worker_id for worker_id, worker in self._workers.items() if worker.seen_s < before_s]

    def place(self, worker_id: str) -> Place | None:
        """Return where a worker's state is, None for one that is not known."""
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.place

    def predict_tokens(self, arrival: Arrival, output_tokens: float) -> int:
        """Return the tokens that a request will hold in whole KV blocks, if it generates about `output_tokens`."""
        tokens = arrival.prompt_tokens + min(arrival.max_new_tokens, int(output_tokens))
        return -(-tokens // self._block_tokens) * self._block_tokens

    def add(self, lease: Lease, prefixes: Iterable[int] = ()) -> None:
        """Count a lease on its worker."""
        worker = self._workers.get(lease.worker_id)
        if worker is not None:
            worker.running += 1
            worker.tokens += lease.tokens
            self._prefixes.add(prefixes, worker.place)

    def remove(self, lease: Lease) -> None:
        """Take back a lease that was added."""
        worker = self._workers.get(lease.worker_id)
        if worker is not None:
            worker.running -= 1
            worker.tokens -= lease.tokens

    def forget_prefixes(self) -> None:
        """Forget what workers computed that are gone, or that have other weights by now."""
        self._prefixes.keep(self.places)

    def takes(self, worker_id: str) -> bool:
        """Tell whether a worker is up and accepts requests, even if not at this moment."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.is_ready

    def has_room(self, worker_id: str, tokens: int) -> bool:
        """Tell whether a worker can run one more request of so many tokens at once."""
        worker = self._workers.get(worker_id)
        return worker is not None and self._has_room(worker, tokens)

    def choose(self, arrival: Arrival, tokens: int) -> str | None:
        """Return the worker with the longest prefix of the prompt, else the one with the least predicted work."""
        fitting = [worker for worker in self._workers.values() if self._has_room(worker, tokens)]
        if not fitting:
            return None
        if len(fitting) > 1 and arrival.prefixes:
            place = self._prefixes.longest(arrival.prefixes, [worker.place for worker in fitting])
            if place is not None:
                return place.worker_id
        # Requests first: each takes a row of the batch, whatever its length.
        best = min(fitting, key=lambda worker: (worker.running / worker.report.capacity, worker.tokens))
        return best.report.worker_id

    def _has_room(self, worker: _Worker, tokens: int) -> bool:
        report = worker.report
        if not worker.is_ready or worker.running >= report.capacity:
            return False
        if report.engine is None or worker.running == 0:
            return True  # a request that fits no worker is the engine's to refuse
        replay = report.engine.replay
        if worker.running >= replay.state_slots:
            return False
        if self._max_kv_share is None:
            return True
        return worker.tokens + tokens <= self._max_kv_share * replay.kv_blocks * self._block_tokens
