"""Which replica has computed which prompt prefix lately; pure.

A prediction for routing, never a promise: the engine compares token by token what it holds with what it is asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

PlaceT = TypeVar('PlaceT')

_LENGTHS = tuple(range(128, 2048, 128)) + tuple(range(2048, 32_769, 1024))
"""Prefix lengths that are hashed, in tokens. Shorter ones cost less to compute again than to go out of the way for."""


def prefix_hashes(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return one 64-bit hash per prefix of a known length that is shorter than the prompt, shortest first."""
    lengths = [length for length in _LENGTHS if length < len(token_ids)]
    if not lengths:
        return ()
    raw = memoryview(np.asarray(token_ids[: lengths[-1]], dtype=np.uint32).tobytes())
    chain = blake2b(digest_size=8)
    hashes = []
    for begin, end in pairwise((0, *lengths)):
        chain.update(raw[4 * begin : 4 * end])
        hashes.append(int.from_bytes(chain.copy().digest(), 'little'))
    return tuple(hashes)


class PrefixIndex(Generic[PlaceT]):
    """Remembers the places that computed a prefix, the least recently used prefixes being forgotten first.

    Args:
        limit: Prefixes remembered.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: OrderedDict[int, list[PlaceT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, hashes: Iterable[int], place: PlaceT) -> None:
        """Note that `place` computes a prompt with these prefixes."""
        for prefix in hashes:
            places = self._places.get(prefix)
            if places is None:
                self._places[prefix] = [place]
            else:
                self._places.move_to_end(prefix)
                if place not in places:
                    places.append(place)
        while len(self._places) > self._limit:
            self._places.popitem(last=False)

    def longest(self, hashes: Sequence[int], among: Iterable[PlaceT]) -> PlaceT | None:
        """Return the one of `among` that has the longest of these prefixes, None when none has any."""
        candidates = set(among)
        for prefix in reversed(hashes):
            for place in self._places.get(prefix, ()):
                if place in candidates:
                    return place
        return None

    def keep(self, alive: Iterable[PlaceT]) -> None:
        """Forget all places but these."""
        kept = set(alive)
        for prefix, places in list(self._places.items()):
            places[:] = [place for place in places if place in kept]
            if not places:
                del self._places[prefix]
