"""Stop strings in a stream of text; pure.

LMDeploy stops at token ids alone: it takes every token that contains a stop string for one, drops its text, and
ignores strings that need several tokens. Here the text decides, so a stop string may span tokens, events and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """Text that may go out now, and whether a stop string ended it."""

    text: str
    stopped: bool = False


class StopStrings:
    """Holds back text that may be the beginning of a stop string until it is known.

    Args:
        strings: Stop strings; empty ones are ignored.
        keep: Whether the stop string itself is part of the output.
    """

    def __init__(self, strings: Sequence[str], keep: bool = False) -> None:
        self._strings = tuple(string for string in strings if string)
        self._keep = keep
        self._held = ''

    def feed(self, text: str) -> Cut:
        """Take new text and return what can be shown. After a stop nothing more may be fed."""
        held = self._held + text
        found = [(at + len(string), at) for string in self._strings if (at := held.find(string)) >= 0]
        if found:
            # The one that is complete first, however the text was cut into pieces; of several the longest.
            end, begin = min(found)
            self._held = ''
            return Cut(held[: end if self._keep else begin], stopped=True)
        keep_back = max((_overlap(held, string) for string in self._strings), default=0)
        self._held = held[len(held) - keep_back :]
        return Cut(held[: len(held) - keep_back])

    def flush(self) -> str:
        """Return what was held back; the text ended before any stop string was complete."""
        held, self._held = self._held, ''
        return held


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest proper prefix of `string` that `text` ends with."""
    return next((size for size in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:size])), 0)
