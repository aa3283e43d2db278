"""Kernels on whatever the tests run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from .interpreter import Interpreter, resolve
from .kernels import forced
from .trial import Decode, Shape

MATERIALISE = 'replayssm.{}.triton_materialise.materialise'


@pytest.fixture(scope='package')
def interpreter(device: str) -> Iterator[Interpreter | None]:
    """Triton's interpreter, None on a GPU."""
    if device == 'cuda':
        yield None
        return
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


@pytest.fixture
def portable(interpreter: Interpreter | None) -> Callable[[Shape], Decode]:
    """The portable `replay_decode` of a shape's layer."""
    if interpreter is None:
        return lambda shape: forced('portable', shape)
    return lambda shape: partial(interpreter.call, f'replayssm.{shape.layer}.decode.replay_decode')


@pytest.fixture
def materialise(interpreter: Interpreter | None) -> Callable[[Shape], Decode]:
    """The `materialise` kernel of a shape's layer."""
    if interpreter is None:
        return lambda shape: resolve(MATERIALISE.format(shape.layer))
    return lambda shape: partial(interpreter.call, MATERIALISE.format(shape.layer))
