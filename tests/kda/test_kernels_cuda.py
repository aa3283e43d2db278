"""What only a GPU shows: the Hopper kernel's shapes, races, CUDA graphs and addresses past 2^31."""

from __future__ import annotations

import pytest
import torch

from replayssm.cursor import advance_decode
from replayssm.gdn.operands import kernel_arguments, validate
from replayssm.gdn.reference import recurrence
from replayssm.kda import decode, sm90_decode
from tests.gdn.state_pool import packed_layers

from .decode_trial import Shape, Trial

pytestmark = pytest.mark.cuda

HEADS = {'H': 3, 'HV': 3}
SHAPES = [
    *(Shape(**HEADS, K=128, V=128, L=16, T=t) for t in range(1, 9)),
    Shape(**HEADS, K=128, V=128, L=16, T=4, bound=None),
    Shape(H=2, HV=6, K=64, V=64, L=16),
    Shape(H=2, HV=4, K=64, V=256, L=5, T=4),
    Shape(**HEADS, K=128, V=256, L=1),
    Shape(**HEADS, K=128, V=64, L=32, T=2),
]
DTYPES = [('float32', 'float32'), ('float32', 'bfloat16'), ('bfloat16', 'float32'), ('bfloat16', 'bfloat16')]
BOUND = {('float32', 'float32'): 5e-6, ('bfloat16', 'float32'): 6e-3}


def hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> torch.Tensor:
    """The Hopper kernel, whatever the selection would be, with float32 outputs."""
    *operands, scale, bound = rest
    v = v.float()
    dims = validate(q, k, v, *operands, gate='vector')  # type: ignore[arg-type]
    out = torch.full(v.shape, float('nan'), dtype=v.dtype, device=v.device)
    arguments = kernel_arguments(q, k, v, *operands, scale, out)  # type: ignore[arg-type]
    sm90_decode.launch(arguments, dims, operands[4], bound)  # type: ignore[arg-type]
    return out


def packed_trial(shape: Shape, batch: int, checkpoint: str = 'float32', record: str = 'float32') -> Trial:
    """A trial on a packed pool, rings full of NaN."""
    trial = Trial(shape, batch, shape.layout(torch.bfloat16, checkpoint, record), 'cuda')
    (state,) = packed_layers(trial.layout, batch + 3, 'cuda')
    for packed, loose in zip(state, trial.state, strict=True):
        packed.copy_(loose)
    trial.state = state
    return trial


@pytest.fixture(autouse=True)
def hopper_card() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip('the Hopper kernel needs compute capability 9.0')


@pytest.mark.parametrize('dtypes', DTYPES, ids='-'.join)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_outputs_equal_the_float64_recurrence(shape: Shape, dtypes: tuple[str, str]) -> None:
    trial = packed_trial(shape, 7, *dtypes)
    trial.slots[3] = -1
    with trial.leaving_other_slots_alone():
        for _ in range(3 * (shape.L + shape.T)):
            assert trial.step(hopper) < BOUND.get(dtypes, 8e-3)
    assert trial.flushes >= 2 * (trial.batch - 1)


@pytest.mark.parametrize('accepts', [(1, 2, 3, 4), (4, 3, 2, 1), (4,), (1,)], ids=str)
def test_mixed_lengths_and_accepts(accepts: tuple[int, ...]) -> None:
    trial = packed_trial(Shape(**HEADS, K=128, V=128, L=16, T=4), batch=4)
    for i in range(64):
        lengths = torch.tensor([1, 4, 2, 3]).roll(i)
        assert trial.step(hopper, lengths, torch.full((4,), accepts[i % len(accepts)])) < 5e-6


def test_slots_past_two_to_the_thirty_one_elements() -> None:
    shape = Shape(H=1, HV=1, K=64, V=64, L=4, T=2)
    trial = Trial(shape, 3, shape.layout(torch.bfloat16), 'cuda')
    (state,) = packed_layers(trial.layout, 6, 'cuda', slot_bytes=2**32 - 2**20)
    for packed, loose in zip(state, trial.state, strict=True):
        packed.copy_(loose)
    trial.state = state
    assert max(trial.step(hopper) for _ in range(12)) < 5e-6


@pytest.mark.parametrize('dtypes', [DTYPES[0], DTYPES[3]], ids='-'.join)
@pytest.mark.parametrize('shape', [SHAPES[0], SHAPES[3], SHAPES[7]], ids=str)
def test_two_thousand_repeats_are_bit_identical(shape: Shape, dtypes: tuple[str, str]) -> None:
    """Programs of one launch neither read what another one appends nor share memory by accident."""
    wide = Shape(H=16, HV=16, K=shape.K, V=shape.V, L=shape.L, T=shape.T)
    trial = packed_trial(wide, 32, *dtypes)
    for tensor in trial.state:
        tensor.normal_()
    trial.state.key_norm.fill_(wide.K**-0.5)
    start = [tensor.clone() for tensor in trial.state]
    inputs = trial.inputs()
    lengths = torch.full_like(trial.history, wide.T)
    history = trial.positions[trial.slots, 0].long() + torch.arange(32, device='cuda') % (wide.L + 1)
    rows = trial.layout.ring_rows
    table = advance_decode(trial.slots, history, lengths, trial.positions[trial.slots], wide.L, rows).table
    first: list[torch.Tensor] = []
    differing = torch.zeros((), dtype=torch.long, device='cuda')
    for _ in range(2000):
        for tensor, value in zip(trial.state, start, strict=True):
            tensor.copy_(value)
        out = hopper(*inputs, trial.neg_exp_a, trial.dt_bias, trial.state, table, *trial.options)
        results = [out, *(tensor.contiguous() for tensor in trial.state)]
        first = first or [tensor.clone() for tensor in results]
        for tensor, expected in zip(results, first, strict=True):
            differing += (tensor.view(torch.int16) != expected.view(torch.int16)).any()
    assert differing.item() == 0
    assert torch.isfinite(first[0]).all()


@pytest.mark.parametrize('kernel', ['hopper', 'selected'])
@pytest.mark.parametrize('window', [1, 4])
def test_a_captured_step_advances_when_replayed(window: int, kernel: str) -> None:
    """Cursors, kernel and positions in one CUDA graph; capture itself advances nothing."""
    shape = Shape(**HEADS, K=128, V=128, L=8, T=window)
    trial = packed_trial(shape, batch=5)
    inputs = trial.inputs()
    slots, lengths, history = trial.slots.clone(), torch.full_like(trial.history, window), trial.history.clone()
    function = hopper if kernel == 'hopper' else decode.replay_decode

    def step() -> torch.Tensor:
        advance = advance_decode(slots, history, lengths, trial.positions[slots], shape.L, trial.layout.ring_rows)
        q, k, v, *rest = inputs
        parameters = (trial.neg_exp_a, trial.dt_bias, trial.state, advance.table, *trial.options)
        out = function(q, k, v.float(), *rest, *parameters)
        trial.positions[slots] = advance.positions
        history.add_(lengths)
        return out

    saved = [tensor.clone() for tensor in (*trial.state, trial.positions, history)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for tensor, value in zip((*trial.state, trial.positions, history), saved, strict=True):
        tensor.copy_(value)

    expected = trial.expected
    for _ in range(30):
        for static, fresh in zip(inputs, trial.inputs(), strict=True):
            static.copy_(fresh)
        graph.replay()
        outputs, states = recurrence(*inputs[:3], *trial.gates(*inputs[3:]), expected)
        assert (out.double() - outputs).norm() / outputs.norm() < 5e-6
        expected = states[:, -1]
    assert torch.equal(history, saved[-1] + 30 * window)
