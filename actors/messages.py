"""Values that cross a process boundary: requests, token events, leases, reports and counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lmdeploy.messages import GenerationConfig
    from prometheus_client.core import Metric

from replayssm.stats import ReplayStats

FinishReason = Literal['stop', 'length', 'abort', 'error']
EndReason = Literal['length', 'stop_token', 'stop_string', 'disconnect', 'timeout', 'abort', 'error']
"""Why a request ended. All but the first are early stops: the engine has run ahead of what the client keeps."""
WorkerState = Literal['loading', 'ready', 'sleeping', 'reloading', 'draining', 'failed']
Action = Literal['sleep', 'wakeup', 'reload']
Priority = Literal['high', 'normal', 'low']
RefusalReason = Literal['queue_full', 'displaced', 'too_many_tokens', 'loading', 'no_worker', 'deadline']
ResumeReason = Literal['worker_died', 'worker_gone', 'worker_aborted', 'worker_paused', 'engine_failed']
"""Why a request asks for another worker: of these only `worker_gone` says that it never reached the first one."""

PAUSED = 'paused'
"""Error of a `TokenEvent`: the worker was put to sleep or got other weights; the request may go on elsewhere."""


class WorkerGone(RuntimeError):
    """The worker that holds a request's lease does not exist any more; the request has not reached it."""


class WorkerLost(Exception):
    """The worker that ran a request will not finish it."""

    def __init__(self, reason: ResumeReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run one request on one worker, held until its outcome is reported.

    Attributes:
        owner: The ingress that renews it.
        session: Whom fairness is between.
        epoch: Of the named session that the request belongs to, 0 for a request of none; the history of a later epoch
            replaces that of an earlier one, never the other way round.
        tokens: Predicted prompt and output tokens.
    """

    request_id: str
    worker_id: str
    owner: str
    session: str
    epoch: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt for one worker.

    Attributes:
        lease: Names the request and the only replica that may run it.
        input_ids: Prompt token ids.
        gen_config: Sampling, all defaults resolved; its `stop_words` are not for the engine.
    """

    lease: Lease
    input_ids: list[int]
    gen_config: GenerationConfig

    @property
    def request_id(self) -> str:
        """Unique among all requests of the deployment."""
        return self.lease.request_id

    @property
    def worker_id(self) -> str:
        """The replica that holds this request's lease; no other replica may run it."""
        return self.lease.worker_id


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one request generated since its previous event.

    Attributes:
        token_ids: New token ids; the stop token that ended the request is left out unless the request wants it.
        logprobs: One `{token id: log-probability}` per new token, or None when not asked for.
        finish_reason: Set on the last event only.
        cached_tokens: Prompt tokens taken from the prefix cache.
        error: LMDeploy's response type by name, or `PAUSED`, when `finish_reason` is 'error'.
    """

    token_ids: list[int]
    logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that asks for admission.

    Attributes:
        request_id: Unique among all requests of the deployment.
        owner: The ingress that sent it and renews its lease.
        session: Whom fairness is between; requests without a session are sessions of their own.
        timeout_s: Seconds it may wait for a worker.
        named: Whether the client named the session, so that its history is kept and its replica is its home.
        priority: Higher ones leave the queue first.
        prompt_tokens: Length of the prompt.
        max_new_tokens: Most tokens it may generate.
        common_tokens: Leading prompt tokens that the session's history has too.
        prefixes: Hashes of the prompt's prefixes, shortest first, see `prefix_index`.
        resumed: Why it asks again with tokens delivered already, None for a new request.
    """

    request_id: str
    owner: str
    session: str
    timeout_s: float
    named: bool = False
    priority: Priority = 'normal'
    prompt_tokens: int = 0
    max_new_tokens: int = 0
    common_tokens: int = 0
    prefixes: tuple[int, ...] = ()
    resumed: ResumeReason | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that will not run, and after how many whole seconds another try makes sense."""

    request_id: str
    reason: RefusalReason
    retry_after_s: int
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an admitted or waiting request ended; reported once per request.

    Times are seconds since the request reached the ingress; None where there was nothing to measure.

    Attributes:
        end: Why it ended.
        generation_tokens: Tokens that reached the ingress.
        cached_tokens: Prompt tokens whose state the worker had; None when it did not get as far as a token.
    """

    request_id: str
    finish_reason: FinishReason
    prompt_tokens: int = 0
    generation_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    end: EndReason = 'error'
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one engine.

    Attributes:
        running: Sequences in the running batch.
        waiting: Sequences that wait inside the engine.
        replay: Memory, capacity and counters of its states and caches.
        lmdeploy: LMDeploy's own figures, see `lmdeploy_metrics`.
    """

    running: int
    waiting: int
    replay: ReplayStats
    lmdeploy: tuple[Metric, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker tells the router about itself, every `report_period_s`.

    Attributes:
        capacity: Requests it may run at once.
        message: Why it is not ready, for people.
        number: Counts how often its numbers were read; those of reading n + 1 were read after a report of reading n
            had arrived.
        running: Leases of the requests that it runs.
        weights_version: How often it has lost all cached states and KV blocks since it started, by a sleep or a
            reload; what was resident under an earlier version is gone.
    """

    worker_id: str
    state: WorkerState
    capacity: int
    message: str = ''
    engine: EngineStats | None = None
    number: int = 0
    running: tuple[Lease, ...] = ()
    weights_version: int = 0


@dataclass(frozen=True, slots=True)
class ReportReply:
    """What the router tells a worker in return.

    Attributes:
        leased: Requests that hold a lease on this worker.
        demand: Running and waiting requests of the whole deployment, in capacities of this worker.
    """

    leased: frozenset[str]
    demand: float


@dataclass(frozen=True, slots=True)
class Change:
    """Put one worker to sleep, wake it up, or give it other weights.

    Attributes:
        worker_id: The worker.
        timeout_s: How long its requests may go on before they are ended.
        level: Of a sleep: 1 keeps the weights in the host's memory, 2 drops them.
        path: Of a reload: a checkpoint folder on the worker's machine; None reads the present one again.
    """

    worker_id: str
    action: Action
    timeout_s: float
    level: Literal[1, 2] = 1
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Changed:
    """What became of a `Change`.

    Attributes:
        outcome: 'refused' left the worker as it was; after 'failed' Serve replaces it.
        ended: Requests that did not end in time and were ended.
        message: Why it was not done.
    """

    worker_id: str
    outcome: Literal['done', 'refused', 'failed']
    state: WorkerState
    weights_version: int
    ended: int = 0
    message: str = ''


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram as values: `counts[i]` samples fell in `(bounds[i-1], bounds[i]]`, the last ones above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Invalidation:
    """Resident state that was given up.

    Attributes:
        time_s: When, in Unix time once it leaves the router.
        reason: See `sessions.InvalidationReason`.
        count: Sessions that lost their state.
    """

    time_s: float
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class SessionStats:
    """A snapshot of the session table.

    Attributes:
        by_state: Named sessions by `sessions.SessionState`.
        invalidations_total: Sessions whose resident or live state was given up, by `sessions.InvalidationReason`.
        recomputed_tokens_total: Tokens of the common history that a worker computed again, by what made it necessary.
        reused_tokens_total, prefix_hits_total: Prompt tokens of all requests, named or not, whose state a worker had,
            and the requests that had any.
        recent: The latest invalidations, oldest first.
    """

    by_state: dict[str, int] = field(default_factory=dict)
    invalidations_total: dict[str, int] = field(default_factory=dict)
    recomputed_tokens_total: dict[str, int] = field(default_factory=dict)
    reused_tokens_total: int = 0
    prefix_hits_total: int = 0
    recent: tuple[Invalidation, ...] = ()


@dataclass(frozen=True, slots=True)
class RouterStats:
    """A snapshot of the router: what `*_total` and the histograms hold only grows. Times are in seconds."""

    model_name: str
    running: int
    queued: int
    admitted_total: int
    rejected_total: dict[str, int]
    finished_total: dict[str, int]
    prompt_tokens_total: int
    generation_tokens_total: int
    ttft_s: Histogram
    tpot_s: Histogram
    e2e_s: Histogram
    queued_tokens: int = 0
    resumed_total: dict[str, int] = field(default_factory=dict)
    sessions: SessionStats = SessionStats()
    workers: tuple[WorkerReport, ...] = field(default=())
