"""A bounded queue with priorities that is fair between sessions; pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import TypeVar, get_args

from actors.messages import Arrival, Priority

T = TypeVar('T')

_Lines = OrderedDict[str, deque[Arrival]]


class FairQueue:
    """Higher priorities go first. Within one, sessions take turns and requests of one session keep their order.

    When full, a request displaces the newest one of the lowest priority's longest line (longest queue drop), if its own
    priority is higher or its own line shorter: a session that floods the queue only ever displaces itself.

    Args:
        limit: Requests that may wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: dict[Priority, _Lines] = {priority: OrderedDict() for priority in get_args(Priority)}
        self._size = 0
        self._tokens = 0

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests that wait."""
        return self._tokens

    def __iter__(self) -> Iterator[Arrival]:
        for lines in self._lines.values():
            for line in lines.values():
                yield from line

    def push(self, arrival: Arrival) -> Arrival | None:
        """Add a request; return the one that had to go, which may be `arrival` itself, or None."""
        displaced = None
        if self._size >= self._limit:
            displaced = self._displace_for(arrival)
            if displaced is arrival:
                return arrival
        self._lines[arrival.priority].setdefault(arrival.session, deque()).append(arrival)
        self._count(arrival, +1)
        return displaced

    def take(self, place: Callable[[Arrival], T | None]) -> Iterator[tuple[Arrival, T]]:
        """Remove and yield, in turn, the requests for which `place` finds a place.

        The first request of a session that finds none holds up its session, not the others.
        """
        for lines in self._lines.values():
            for session in list(lines):
                line = lines[session]
                found = place(line[0])
                if found is None:
                    continue
                arrival = line.popleft()
                self._count(arrival, -1)
                if line:
                    lines.move_to_end(session)
                else:
                    del lines[session]
                yield arrival, found

    def remove(self, request_id: str) -> Arrival | None:
        """Remove and return one request wherever it stands, None when it is not there."""
        for lines in self._lines.values():
            for session, line in lines.items():
                for arrival in line:
                    if arrival.request_id == request_id:
                        self._drop(lines, session, arrival)
                        return arrival
        return None

    def _displace_for(self, arrival: Arrival) -> Arrival:
        """Take out and return the request that must go when `arrival` comes."""
        for priority, lines in reversed(self._lines.items()):
            if lines:
                session, longest = max(lines.items(), key=lambda item: len(item[1]))
                is_mine_longest = len(longest) <= len(lines.get(arrival.session, ())) + 1
                if priority == arrival.priority and is_mine_longest:
                    return arrival
                newest = longest[-1]
                self._drop(lines, session, newest)
                return newest
            if priority == arrival.priority:
                return arrival  # all others matter more
        return arrival

    def _drop(self, lines: _Lines, session: str, arrival: Arrival) -> None:
        line = lines[session]
        line.remove(arrival)
        self._count(arrival, -1)
        if not line:
            del lines[session]

    def _count(self, arrival: Arrival, sign: int) -> None:
        self._size += sign
        self._tokens += sign * arrival.prompt_tokens
