"""Kernels on whatever the tests run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from replayssm.gdn import triton_materialise as gdn_materialise
from replayssm.kda import triton_materialise as kda_materialise

from .interpreter import Interpreter
from .kernels import forced
from .trial import Decode, Shape

Materialise = Callable[..., torch.Tensor]


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
def materialise(interpreter: Interpreter | None) -> Callable[[Shape], Materialise]:
    """The `materialise` kernel of a shape's layer."""
    if interpreter is None:
        return lambda shape: {'gdn': gdn_materialise, 'kda': kda_materialise}[shape.layer].materialise
    return lambda shape: partial(interpreter.call, f'replayssm.{shape.layer}.triton_materialise.materialise')
