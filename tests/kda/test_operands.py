"""What the launcher refuses; no kernel runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm.cursor import CURSOR_COLUMNS
from replayssm.gdn.operands import Dims, validate
from replayssm.kda.decode import replay_decode
from tests.replay.trial import KdaShape


def operands(shape: KdaShape) -> dict[str, Any]:
    trial = shape.trial(2)
    names = ('q', 'k', 'v', 'a', 'b', 'neg_exp_a', 'dt_bias', 'state', 'cursors')
    cursors = torch.zeros(2, CURSOR_COLUMNS, dtype=torch.int32)
    values = (*trial.inputs(), trial.neg_exp_a, trial.dt_bias, trial.state, cursors)
    return dict(zip(names, values, strict=True))


def test_views_of_one_projection_are_accepted() -> None:
    shape = KdaShape(H=2, HV=6, K=16, V=48, T=3)
    assert validate(**operands(shape), gate='vector') == Dims(B=2, T=3, H=2, HV=6, K=16, V=48, R=11)


@pytest.mark.parametrize(
    ('name', 'change', 'message'),
    [
        ('a', lambda x: x[..., 0], r'a\.shape: expected \(2, 2, 4, 16\), got \(2, 2, 4\)'),
        ('a', lambda x: x.mT.contiguous().mT, r'a: expected dimensions 2\.\. contiguous'),
        ('dt_bias', lambda x: x[:, 0], r'dt_bias\.shape: expected \(4, 16\), got \(4,\)'),
        ('state', lambda x: x._replace(gate=x.gate.bfloat16()), r'state\.gate\.dtype: expected .*float32'),
        ('state', lambda x: x._replace(gate=x.gate[..., 0]), r'state\.gate\.shape: expected \(5, 4, 10, 16\)'),
    ],
)
def test_bad_operands_are_named(name: str, change: Any, message: str) -> None:
    arguments = operands(KdaShape(H=2, HV=4, T=2))
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        validate(**arguments, gate='vector')


def test_a_cpu_without_the_interpreter_is_refused() -> None:
    with pytest.raises(ValueError, match=r'device: expected a GPU.*got cpu'):
        replay_decode(**operands(KdaShape()))
