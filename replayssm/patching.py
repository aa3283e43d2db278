"""Reversible attribute replacement: the only way this package changes LMDeploy, torch or Ray."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_ABSENT: Any = object()


class Patches:
    """A stack of attribute replacements that can be undone in reverse order.

    What the owner itself held is kept (a classmethod or staticmethod object stays one), so `undo` restores the owner
    bit for bit, also when the attribute was only inherited.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Replace `owner.name` by `value` and return what attribute access gave before.

        Raises:
            AttributeError: `owner` has no attribute `name`; a released name that vanished must not pass silently.
        """
        original = getattr(owner, name)
        self._restore_on_undo(owner, name)
        setattr(owner, name, value)
        return original

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Give `owner` a new attribute.

        Raises:
            AttributeError: `owner` has an attribute `name` already.
        """
        if hasattr(owner, name):
            raise AttributeError(f'{owner!r} already has an attribute {name!r}')
        self._restore_on_undo(owner, name)
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: replace method `owner.name` by a function that is given the original before its own arguments.

        The original of a classmethod is bound already: the function gets no `cls`.
        """

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            original = getattr(owner, name)

            @functools.wraps(original)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return function(original, *args, **kwargs)

            is_bound = isinstance(vars(owner).get(name), classmethod)
            self.set(owner, name, staticmethod(replacement) if is_bound else replacement)
            return function

        return decorate

    def on_undo(self, callback: Callable[[], None]) -> None:
        """Call `callback` when these patches are undone, in its turn."""
        self._undo.append(callback)

    def undo(self) -> None:
        """Restore every replaced attribute, last one first."""
        while self._undo:
            self._undo.pop()()

    def _restore_on_undo(self, owner: Any, name: str) -> None:
        held = vars(owner).get(name, _ABSENT)
        if held is _ABSENT:
            self.on_undo(functools.partial(delattr, owner, name))
        else:
            self.on_undo(functools.partial(setattr, owner, name, held))
