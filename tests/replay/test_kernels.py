"""Portable kernels against the float64 recurrence: in Triton's interpreter on a CPU, compiled with --device cuda."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .kernels import to_float32
from .trial import Decode, KdaShape, Kind, Shape, both_layers

SHAPES = [
    Shape(H=1, HV=2, L=4),
    Shape(H=1, HV=1, L=1),
    Shape(H=1, HV=3, K=16, V=48, L=3),
    Shape(H=2, HV=2, K=24, V=8, L=5),
    Shape(H=1, HV=2, T=4, L=4),
    Shape(H=1, HV=1, K=16, V=48, T=3, L=6),
    Shape(H=1, HV=1, T=8, L=9),
    KdaShape(H=1, HV=2, L=4),
    KdaShape(H=1, HV=1, L=1, bound=None),
    KdaShape(H=1, HV=3, K=16, V=48, L=3),
    KdaShape(H=2, HV=2, K=24, V=8, L=5, bound=None),
    KdaShape(H=1, HV=2, T=4, L=4),
    KdaShape(H=1, HV=1, K=16, V=48, T=3, L=6, bound=None),
    KdaShape(H=1, HV=1, T=8, L=9),
]
Kernels = Callable[[Shape], Decode]


@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_outputs_equal_the_float64_recurrence(shape: Shape, portable: Kernels, device: str) -> None:
    trial = shape.trial(2, device)
    for _ in range(100):
        assert trial.step(portable(shape)) < 2e-6
        if trial.flushes >= 2 * trial.batch:
            break
    assert trial.flushes >= 2 * trial.batch


@pytest.mark.parametrize(
    ('checkpoint', 'record', 'bound'),
    [('float32', 'bfloat16', 6e-3), ('bfloat16', 'bfloat16', 8e-3), ('bfloat16', 'float32', 6e-3)],
)
@both_layers
def test_reduced_precision_state(
    kind: Kind, checkpoint: str, record: str, bound: float, portable: Kernels, device: str
) -> None:
    shape = kind(H=1, HV=2, T=2, L=4)
    trial = shape.trial(2, device, torch.bfloat16, checkpoint, record)
    worst = max(trial.step(to_float32(portable(shape))) for _ in range(12))
    assert 1e-5 < worst < bound


@both_layers
def test_padding_rows_and_slots_outside_the_batch_stay_untouched(kind: Kind, portable: Kernels, device: str) -> None:
    shape = kind(H=1, HV=2, T=2, L=3)
    trial = shape.trial(3, device)
    trial.slots[1] = -1
    with trial.leaving_other_slots_alone():
        for _ in range(8):
            assert trial.step(portable(shape)) < 2e-6


@both_layers
def test_windows_of_mixed_length(kind: Kind, portable: Kernels, device: str) -> None:
    """Windows of 1, 4, 2 tokens in turn, and of different length in one batch."""
    shape = kind(H=1, HV=1, T=4, L=5)
    trial = shape.trial(3, device)
    for i in range(9):
        assert trial.step(portable(shape), torch.tensor([1, 4, 2]).roll(i)) < 2e-6


@pytest.mark.parametrize('order', [(1, 2, 3), (3, 1), (3,), (1,)], ids=str)
@both_layers
def test_accept_counts_in_every_order(kind: Kind, order: tuple[int, ...], portable: Kernels, device: str) -> None:
    shape = kind(H=1, HV=1, T=3, L=4)
    trial = shape.trial(2, device)
    for i in range(8):
        assert trial.step(portable(shape), accepts=torch.full((2,), order[i % len(order)])) < 2e-6


@both_layers
def test_tokens_behind_a_row_s_length_may_be_nan(kind: Kind, portable: Kernels, device: str) -> None:
    shape = kind(H=1, HV=2, T=3, L=5)
    trial = shape.trial(2, device)

    def poisoned(*operands: object) -> torch.Tensor:
        tokens = [tensor.clone() for tensor in operands[:5] if isinstance(tensor, torch.Tensor)]
        for tensor in tokens:
            tensor[0, 1:] = float('nan')
        return portable(shape)(*tokens, *operands[5:])

    for _ in range(6):
        assert trial.step(poisoned, lengths=torch.tensor([1, 3])) < 2e-6


@both_layers
def test_a_copied_slot_with_pending_records_continues_identically(kind: Kind, portable: Kernels, device: str) -> None:
    shape = kind(H=1, HV=1, T=2, L=5)
    trial = shape.trial(2, device)
    for _ in range(3):
        trial.step(portable(shape))
    for tensor in (*trial.state, trial.positions):
        tensor[4] = tensor[2]
    history, expected = trial.history[1].clone(), trial.expected[1].clone()
    for _ in range(4):
        trial.step(portable(shape))
    trial.slots, trial.history = torch.tensor([4, -1], device=device), history.repeat(2)
    trial.expected = expected.repeat(2, 1, 1, 1)
    for _ in range(6):
        assert trial.step(portable(shape)) < 2e-6


@pytest.mark.parametrize(
    'shape',
    [
        Shape(H=1, HV=2, K=24, V=40, T=2, L=6),
        KdaShape(H=1, HV=2, K=24, V=40, T=2, L=6),
        KdaShape(H=1, HV=2, K=24, V=40, T=2, L=6, bound=None),
    ],
    ids=str,
)
def test_materialised_states_equal_the_reference(
    shape: Shape, portable: Kernels, materialise: Kernels, device: str
) -> None:
    trial = shape.trial(3, device)
    trial.slots[1] = -1
    for _ in range(4):
        trial.step(portable(shape))
        operands = trial.materialise_operands()
        expected = shape.reference.materialise(*operands)
        torch.testing.assert_close(materialise(shape)(*operands), expected, rtol=1e-5, atol=1e-6)
