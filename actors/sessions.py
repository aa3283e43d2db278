"""What is known of every named session: retained history, epoch, home and resident state; pure.

The engine's private state of a request ends with the request: forwards in flight and drafts have taken it past what
the client keeps. What survives is the history in tokens, kept here, and prefix checkpoints on the worker that ran the
request, which the engine only ever restores after comparing every token. So a stale state cannot serve a token; this
table decides where a request finds the most of its state, and counts what is given up and what is computed again.

Every request of a session has an epoch of its own, higher than those before it. The history that a request leaves
behind replaces that of lower epochs alone: an abort that is reported late does not undo what came after it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from actors.messages import EndReason, Invalidation, SessionStats

SessionState = Literal['running', 'resident', 'cold']
InvalidationReason = Literal[
    'stop_token',
    'stop_string',
    'disconnect',
    'timeout',
    'abort',
    'error',
    'edited',
    'moved',
    'replica_lost',
    'replica_drained',
    'weights_reloaded',
    'expired',
    'displaced',
]
"""Why live or resident state was given up: six early stops, two at admission, three of replicas, two of the table."""
RecomputeReason = Literal['not_kept', 'edited', 'moved', 'replica_lost', 'replica_drained', 'weights_reloaded']
PlaceLoss = Literal['replica_lost', 'replica_drained', 'weights_reloaded']

_RECENT = 20
_CLOSED = 100
"""Places whose loss is remembered until their sessions learn of it."""


class Place(NamedTuple):
    """A worker with the weights that its state was computed with."""

    worker_id: str
    weights_version: int


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of the table.

    Attributes:
        max_sessions: Sessions remembered; the least recently used are forgotten first.
        max_tokens: Tokens of all histories together.
        ttl_s: Silence after which a session is forgotten.
        keeps_state: Whether workers keep prefix checkpoints.
    """

    max_sessions: int
    max_tokens: int
    ttl_s: float
    keeps_state: bool


@dataclass(slots=True)
class _Session:
    used_s: float
    history: bytes = b''
    epoch: int = 0
    history_epoch: int = 0
    place_epoch: int = 0
    place: Place | None = None
    position: int = 0
    lost: RecomputeReason = 'not_kept'
    running: int = 0


@dataclass(frozen=True, slots=True)
class _Run:
    place: Place
    common_tokens: int
    prompt_tokens: int
    recompute: RecomputeReason


def pack(token_ids: Sequence[int]) -> bytes:
    """Return token ids as 4 bytes each."""
    return np.asarray(token_ids, dtype=np.uint32).tobytes()


def unpack(history: bytes) -> list[int]:
    """Return the token ids that `pack` was given."""
    ids: list[int] = np.frombuffer(history, dtype=np.uint32).tolist()
    return ids


class SessionTable:
    """The sessions, least recently used first. Times are arguments, in seconds of one clock."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._runs: dict[tuple[str, int], _Run] = {}
        self._idle_at: dict[Place, int] = {}  # places that are up, with the idle sessions that are resident there
        self._closed: dict[Place, PlaceLoss] = {}
        self._tokens = 0
        self._running = 0
        self._invalidations: Counter[str] = Counter()
        self._recomputed: Counter[str] = Counter()
        self._reused = 0
        self._hits = 0
        self._recent: deque[Invalidation] = deque(maxlen=_RECENT)

    def __len__(self) -> int:
        return len(self._sessions)

    def history(self, name: str) -> bytes:
        """Return the retained history of a session, packed; empty for one that is not known."""
        session = self._sessions.get(name)
        return b'' if session is None else session.history

    def home(self, name: str) -> Place | None:
        """Return where the session's state is resident, None when it is nowhere."""
        session = self._sessions.get(name)
        return session.place if session is not None and self._is_resident(session) else None

    def state(self, name: str) -> SessionState | None:
        """Return what state a session is in, None for one that is not known."""
        session = self._sessions.get(name)
        if session is None:
            return None
        return 'running' if session.running else 'resident' if self._is_resident(session) else 'cold'

    def admit(self, name: str, place: Place, prompt_tokens: int, common_tokens: int, now_s: float) -> int:
        """Begin a request of a session at `place`; return its epoch.

        Args:
            prompt_tokens: Length of the prompt.
            common_tokens: Leading tokens that it has in common with the retained history.
        """
        session = self._touch(name, now_s)
        self.open(place)
        self._count_idle(session, -1)
        self._running += session.running == 0
        session.running += 1
        session.epoch += 1
        recompute = session.lost
        if self._is_resident(session):
            if session.place != place:
                self._give_up('moved', now_s)
                session.place, recompute = None, 'moved'
            elif session.position > common_tokens:
                self._give_up('edited', now_s)
                session.position, recompute = common_tokens, 'edited'
        self._runs[name, session.epoch] = _Run(place, common_tokens, prompt_tokens, recompute)
        return session.epoch

    def adopt(self, name: str, epoch: int, place: Place, now_s: float) -> None:
        """Take over a request that another table admitted; the next epoch is a later one."""
        session = self._touch(name, now_s)
        self.open(place)
        self._count_idle(session, -1)
        self._running += session.running == 0
        session.running += 1
        session.epoch = max(session.epoch, epoch)
        self._runs[name, epoch] = _Run(place, 0, 0, 'not_kept')

    def finish(self, name: str, epoch: int, end: EndReason | None, cached_tokens: int | None, now_s: float) -> None:
        """End a request; one that is not known is ignored.

        Args:
            end: Why it ended; None when it is to be tried again, so that the client has not lost anything yet.
            cached_tokens: Prompt tokens whose state the worker had, None when it did not get that far.
        """
        run = self._runs.pop((name, epoch), None)
        if run is None:
            return
        session = self._touch(name, now_s)
        session.running -= 1
        self._running -= session.running == 0
        if end is not None and end != 'length':
            self._give_up(end, now_s)
        if cached_tokens is not None:
            self._recomputed[run.recompute] += max(run.common_tokens - cached_tokens, 0)
            if self._limits.keeps_state and epoch > session.place_epoch and run.place in self._idle_at:
                # The engine takes a checkpoint where the prefill ends.
                session.place, session.place_epoch, session.position = run.place, epoch, run.prompt_tokens
            session.lost = 'not_kept'
        self._count_idle(session, +1)

    def remember(self, name: str, epoch: int, history: bytes, now_s: float) -> None:
        """Keep what the client has after a request: the packed history of the latest epoch is the session's."""
        session = self._touch(name, now_s)
        session.epoch = max(session.epoch, epoch)
        if epoch > session.history_epoch:
            self._tokens += (len(history) - len(session.history)) // 4
            session.history, session.history_epoch = history, epoch
            self._shrink(now_s)

    def count_prefix(self, cached_tokens: int) -> None:
        """Count prompt tokens of any request, named or not, whose state a worker had."""
        self._reused += cached_tokens
        self._hits += cached_tokens > 0

    def open(self, place: Place) -> None:
        """Note that a worker is there."""
        self._idle_at.setdefault(place, 0)

    def close(self, place: Place, reason: PlaceLoss, now_s: float) -> None:
        """Give up all state at `place`. Sessions learn of it when they are next looked at: there may be very many."""
        lost = self._idle_at.pop(place, 0)
        lost += len({name for (name, _), run in self._runs.items() if run.place == place})
        self._closed[place] = reason
        while len(self._closed) > _CLOSED:
            del self._closed[next(iter(self._closed))]
        if lost:
            self._give_up(reason, now_s, lost)

    def expire(self, now_s: float) -> None:
        """Forget sessions that have been silent for too long; takes time for these alone."""
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            if now_s - session.used_s <= self._limits.ttl_s:
                return
            if session.running:
                self._touch(name, now_s)
            else:
                self._forget(name, 'expired', now_s)

    def stats(self) -> SessionStats:
        """Return all numbers of this moment."""
        resident = sum(self._idle_at.values())
        by_state = {
            'running': self._running,
            'resident': resident,
            'cold': len(self._sessions) - self._running - resident,
        }
        return SessionStats(
            by_state,
            dict(self._invalidations),
            dict(self._recomputed),
            self._reused,
            self._hits,
            tuple(self._recent),
        )

    def _touch(self, name: str, now_s: float) -> _Session:
        """Return a session as the most recently used one, made if it is not known."""
        session = self._sessions.get(name)
        if session is None:
            self._shrink(now_s, room=1)
            session = self._sessions[name] = _Session(now_s)
        else:
            self._sessions.move_to_end(name)
            session.used_s = now_s
            if session.place is not None and session.place not in self._idle_at:
                session.lost = self._closed.get(session.place, 'replica_lost')
                session.place = None
        return session

    def _is_resident(self, session: _Session) -> bool:
        return session.position > 0 and session.place in self._idle_at

    def _count_idle(self, session: _Session, sign: int) -> None:
        """Add or take away an idle session at its place; one that runs is not idle."""
        if session.place is not None and not session.running and self._is_resident(session):
            self._idle_at[session.place] += sign

    def _give_up(self, reason: InvalidationReason, now_s: float, count: int = 1) -> None:
        self._invalidations[reason] += count
        self._recent.append(Invalidation(now_s, reason, count))

    def _shrink(self, now_s: float, room: int = 0) -> None:
        """Forget the least recently used sessions that are idle until the bounds hold with `room` more."""
        while len(self._sessions) + room > self._limits.max_sessions or self._tokens > self._limits.max_tokens:
            name = next((name for name, session in self._sessions.items() if not session.running), None)
            if name is None:
                return
            self._forget(name, 'displaced', now_s)

    def _forget(self, name: str, reason: Literal['expired', 'displaced'], now_s: float) -> None:
        session = self._sessions.pop(name)
        self._tokens -= len(session.history) // 4
        if self._is_resident(session):
            self._count_idle(session, -1)
            self._give_up(reason, now_s)
