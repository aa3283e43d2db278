"""Kernels of models on whatever the tests run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.replay.interpreter import calling


@pytest.fixture(scope='package')
def call(device: str) -> Iterator[Callable[..., Any]]:
    """Calls a function of `replayssm.models.glm5_next` by the rest of its name."""
    with calling(device) as call:
        yield lambda name, *operands: call(f'replayssm.models.glm5_next.{name}', *operands)
