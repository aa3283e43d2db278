"""The kernels against the float64 recurrence: in Triton's interpreter on a CPU, compiled with --device cuda."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from replayssm.gdn import triton_decode
from replayssm.gdn.operands import kernel_arguments, validate

from .decode_trial import Decode, Shape, Trial
from .interpreter import Interpreter

SHAPES = [
    Shape(H=1, HV=2, L=4),
    Shape(H=1, HV=1, L=1),
    Shape(H=1, HV=3, K=16, V=48, L=3),
    Shape(H=2, HV=2, K=24, V=8, L=5),
    Shape(H=1, HV=2, T=4, L=4),
    Shape(H=1, HV=1, K=16, V=48, T=3, L=6),
    Shape(H=1, HV=1, T=8, L=9),
]


def portable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> torch.Tensor:
    """The portable kernel, whatever the selection would be."""
    dims = validate(q, k, v, *rest)  # type: ignore[arg-type]
    out = torch.full(v.shape, float('nan'), dtype=v.dtype, device=v.device)
    triton_decode.launch(kernel_arguments(q, k, v, *rest, dims.K**-0.5, out), dims)  # type: ignore[arg-type]
    return out


@pytest.fixture(scope='module')
def decode(device: str) -> Iterator[Decode]:
    if device == 'cuda':
        yield portable
        return
    interpreter = Interpreter('replayssm.gdn.decode')
    yield interpreter.replay_decode
    interpreter.close()


@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_outputs_equal_the_float64_recurrence(shape: Shape, decode: Decode, device: str) -> None:
    trial = Trial(shape, batch=2, layout=shape.layout(), device=device)
    for _ in range(100):
        assert trial.step(decode) < 2e-6
        if trial.flushes >= 2 * trial.batch:
            break
    assert trial.flushes >= 2 * trial.batch


@pytest.mark.parametrize(
    ('checkpoint', 'record', 'bound'),
    [('float32', 'bfloat16', 6e-3), ('bfloat16', 'bfloat16', 8e-3), ('bfloat16', 'float32', 6e-3)],
)
def test_reduced_precision_state(checkpoint: str, record: str, bound: float, decode: Decode, device: str) -> None:
    shape = Shape(H=1, HV=2, T=2, L=4)
    trial = Trial(shape, 2, shape.layout(torch.bfloat16, checkpoint, record), device)
    worst = max(trial.step(lambda q, k, v, *rest: decode(q, k, v.float(), *rest)) for _ in range(12))
    assert 1e-5 < worst < bound


def test_padding_rows_and_slots_outside_the_batch_stay_untouched(decode: Decode, device: str) -> None:
    shape = Shape(H=1, HV=2, T=2, L=3)
    trial = Trial(shape, batch=3, layout=shape.layout(), device=device)
    trial.slots[1] = -1
    with trial.leaving_other_slots_alone():
        for _ in range(8):
            assert trial.step(decode) < 2e-6


def test_windows_of_mixed_length(decode: Decode, device: str) -> None:
    """Windows of 1, 4, 2 tokens in turn, and of different length in one batch."""
    shape = Shape(H=1, HV=1, T=4, L=5)
    trial = Trial(shape, batch=3, layout=shape.layout(), device=device)
    for i in range(9):
        assert trial.step(decode, torch.tensor([1, 4, 2]).roll(i)) < 2e-6


@pytest.mark.parametrize('order', [(1, 2, 3), (3, 1), (3,), (1,)], ids=str)
def test_accept_counts_in_every_order(order: tuple[int, ...], decode: Decode, device: str) -> None:
    shape = Shape(H=1, HV=1, T=3, L=4)
    trial = Trial(shape, batch=2, layout=shape.layout(), device=device)
    for i in range(8):
        assert trial.step(decode, accepts=torch.full((2,), order[i % len(order)])) < 2e-6


def test_tokens_behind_a_row_s_length_may_be_nan(decode: Decode, device: str) -> None:
    shape = Shape(H=1, HV=2, T=3, L=5)
    trial = Trial(shape, batch=2, layout=shape.layout(), device=device)

    def poisoned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: object):
        q, k, v, a, b = (tensor.clone() for tensor in (q, k, v, a, b))
        for tensor in (q, k, v, a, b):
            tensor[0, 1:] = float('nan')
        return decode(q, k, v, a, b, *rest)

    for _ in range(6):
        assert trial.step(poisoned, lengths=torch.tensor([1, 3])) < 2e-6


def test_a_copied_slot_with_pending_records_continues_identically(decode: Decode, device: str) -> None:
    shape = Shape(H=1, HV=1, T=2, L=5)
    trial = Trial(shape, batch=2, layout=shape.layout(), device=device)
    for _ in range(3):
        trial.step(decode)
    for tensor in (*trial.state, trial.positions):
        tensor[4] = tensor[2]
    history, expected = trial.history[1].clone(), trial.expected[1].clone()
    for _ in range(4):
        trial.step(decode)
    trial.slots, trial.history = torch.tensor([4, -1], device=device), history.repeat(2)
    trial.expected = expected.repeat(2, 1, 1, 1)
    for _ in range(6):
        assert trial.step(decode) < 2e-6
