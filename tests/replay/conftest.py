"""Kernels on whatever the tests run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from .interpreter import calling
from .kernels import forced
from .trial import Decode, Shape

MATERIALISE = 'replayssm.{}.triton_materialise.materialise'


@pytest.fixture(scope='package')
def call(device: str) -> Iterator[Callable[..., Any]]:
    """Calls a function by its full name."""
    with calling(device) as call:
        yield call


@pytest.fixture
def portable(call: Callable[..., Any], device: str) -> Callable[[Shape], Decode]:
    """The portable `replay_decode` of a shape's layer."""
    if device == 'cuda':
        return lambda shape: forced('portable', shape)
    return lambda shape: partial(call, f'replayssm.{shape.layer}.decode.replay_decode')


@pytest.fixture
def materialise(call: Callable[..., Any]) -> Callable[[Shape], Decode]:
    """The `materialise` kernel of a shape's layer."""
    return lambda shape: partial(call, MATERIALISE.format(shape.layer))
