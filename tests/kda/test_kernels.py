"""The kernels against the float64 recurrence: in Triton's interpreter on a CPU, compiled with --device cuda."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from replayssm.cursor import read_prefill
from replayssm.gdn.operands import kernel_arguments, validate
from replayssm.kda import decode as kda_decode
from replayssm.kda import triton_decode
from replayssm.kda.reference import materialise
from tests.gdn.interpreter import Interpreter

from .decode_trial import Shape, Trial

SHAPES = [
    Shape(H=1, HV=2, L=4),
    Shape(H=1, HV=1, L=1, bound=None),
    Shape(H=1, HV=3, K=16, V=48, L=3),
    Shape(H=2, HV=2, K=24, V=8, L=5, bound=None),
    Shape(H=1, HV=2, T=4, L=4),
    Shape(H=1, HV=1, K=16, V=48, T=3, L=6, bound=None),
    Shape(H=1, HV=1, T=8, L=9),
]

Function = Callable[..., torch.Tensor]


def portable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> torch.Tensor:
    """The portable kernel, whatever the selection would be."""
    *operands, scale, bound = rest
    dims = validate(q, k, v, *operands, gate='vector')  # type: ignore[arg-type]
    out = torch.full(v.shape, float('nan'), dtype=v.dtype, device=v.device)
    triton_decode.launch(kernel_arguments(q, k, v, *operands, scale, out), dims, bound)  # type: ignore[arg-type]
    return out


@pytest.fixture(scope='module')
def functions(device: str) -> Iterator[tuple[Function, Function]]:
    """`replay_decode` and `materialise` of the portable kernels."""
    if device == 'cuda':
        yield portable, kda_decode.materialise
        return
    interpreter = Interpreter('replayssm.kda.decode')
    yield interpreter.replay_decode, lambda *operands: interpreter.call('materialise', *operands)
    interpreter.close()


@pytest.fixture(scope='module')
def decode(functions: tuple[Function, Function]) -> Function:
    return functions[0]


@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_outputs_equal_the_float64_recurrence(shape: Shape, decode: Function, device: str) -> None:
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
def test_reduced_precision_state(checkpoint: str, record: str, bound: float, decode: Function, device: str) -> None:
    shape = Shape(H=1, HV=2, T=2, L=4)
    trial = Trial(shape, 2, shape.layout(torch.bfloat16, checkpoint, record), device)
    worst = max(trial.step(lambda q, k, v, *rest: decode(q, k, v.float(), *rest)) for _ in range(12))
    assert 1e-5 < worst < bound


def test_padding_rows_and_slots_outside_the_batch_stay_untouched(decode: Function, device: str) -> None:
    shape = Shape(H=1, HV=2, T=2, L=3)
    trial = Trial(shape, batch=3, layout=shape.layout(), device=device)
    trial.slots[1] = -1
    with trial.leaving_other_slots_alone():
        for _ in range(5):
            assert trial.step(decode) < 2e-6


def test_windows_of_mixed_length(decode: Function, device: str) -> None:
    """Windows of 1, 4, 2 tokens in turn, and of different length in one batch."""
    shape = Shape(H=1, HV=1, T=4, L=5)
    trial = Trial(shape, batch=3, layout=shape.layout(), device=device)
    for i in range(6):
        assert trial.step(decode, torch.tensor([1, 4, 2]).roll(i)) < 2e-6


@pytest.mark.parametrize('order', [(1, 2, 3), (3, 1)], ids=str)
def test_accept_counts_in_every_order(order: tuple[int, ...], decode: Function, device: str) -> None:
    shape = Shape(H=1, HV=1, T=3, L=4)
    trial = Trial(shape, batch=2, layout=shape.layout(), device=device)
    for i in range(6):
        assert trial.step(decode, accepts=torch.full((2,), order[i % len(order)])) < 2e-6


def test_tokens_behind_a_row_s_length_may_be_nan(decode: Function, device: str) -> None:
    shape = Shape(H=1, HV=2, T=3, L=5)
    trial = Trial(shape, batch=2, layout=shape.layout(), device=device)

    def poisoned(*operands: object) -> torch.Tensor:
        tokens = [tensor.clone() for tensor in operands[:5] if isinstance(tensor, torch.Tensor)]
        for tensor in tokens:
            tensor[0, 1:] = float('nan')
        return decode(*tokens, *operands[5:])

    for _ in range(6):
        assert trial.step(poisoned, lengths=torch.tensor([1, 3])) < 2e-6


@pytest.mark.parametrize('bound', [None, -5.0])
def test_materialised_states_equal_the_reference(
    bound: float | None, functions: tuple[Function, Function], device: str
) -> None:
    shape = Shape(H=1, HV=2, K=24, V=40, T=2, L=6, bound=bound)
    trial = Trial(shape, batch=3, layout=shape.layout(), device=device)
    trial.slots[1] = -1
    decode, materialise_kernel = functions
    for _ in range(4):
        trial.step(decode)
        slots = trial.slots.clamp_min(0)
        table = read_prefill(trial.slots, trial.history, trial.positions[slots], trial.layout.ring_rows)
        arguments = (trial.state, table, trial.neg_exp_a, trial.dt_bias, bound)
        torch.testing.assert_close(materialise_kernel(*arguments), materialise(*arguments), rtol=1e-5, atol=1e-6)
