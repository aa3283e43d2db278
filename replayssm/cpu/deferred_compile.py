"""Importing LMDeploy without loading torch's compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from replayssm.patching import Patches


@contextmanager
def deferred_compile() -> Iterator[None]:
    """Let `torch.compile` load the compiler on the first call of what it decorates, not on decoration.

    LMDeploy decorates one operator at import. Loading the compiler for it takes half of the start of every process,
    and the cpu backend never calls it.
    """
    patches = Patches()
    patches.set(torch, 'compile', _defer)
    try:
        yield
    finally:
        patches.undo()


_stock_compile = torch.compile


def _defer(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    if model is None:
        return functools.partial(_defer, **options)
    compiled = functools.cache(lambda: _stock_compile(model, **options))

    @functools.wraps(model)
    def compile_on_first_call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return compile_on_first_call
