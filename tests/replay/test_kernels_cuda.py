"""What only a GPU shows: the shapes of the kernels it runs, races, CUDA graphs and addresses past 2^31."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from replayssm.cursor import advance_decode
from replayssm.gdn.reference import recurrence
from replayssm.layout import LayerState

from .interpreter import resolve
from .kernels import Kernel, forced, to_float32
from .state_pool import packed_layers
from .trial import KdaShape, Kind, Shape, Trial, both_layers

pytestmark = pytest.mark.cuda

GDN_HEADS, KDA_HEADS = {'H': 2, 'HV': 6}, {'H': 3, 'HV': 3}
WINDOWS = {
    Shape: [Shape(**GDN_HEADS, K=128, V=128, L=16, T=t) for t in range(1, 9)],
    KdaShape: [KdaShape(**KDA_HEADS, K=128, V=128, L=16, T=t) for t in range(1, 9)],
}
SHAPES = [
    *WINDOWS[Shape],
    Shape(**GDN_HEADS, K=64, V=64, L=16),
    Shape(**GDN_HEADS, K=64, V=256, L=5, T=4),
    Shape(**GDN_HEADS, K=256, V=64, L=32, T=4),
    Shape(**GDN_HEADS, K=256, V=256, L=32, T=8),
    Shape(**GDN_HEADS, K=128, V=256, L=1),
    Shape(H=3, HV=3, K=128, V=64, L=9, T=2),
    *WINDOWS[KdaShape],
    KdaShape(**KDA_HEADS, K=128, V=128, L=16, T=4, bound=None),
    KdaShape(H=2, HV=6, K=64, V=64, L=16),
    KdaShape(H=2, HV=4, K=64, V=256, L=5, T=4),
    KdaShape(**KDA_HEADS, K=128, V=256, L=1),
    KdaShape(**KDA_HEADS, K=128, V=64, L=32, T=2),
]
DTYPES = [('float32', 'float32'), ('float32', 'bfloat16'), ('bfloat16', 'float32'), ('bfloat16', 'bfloat16')]
FLOAT32_BOUND = {'gdn': 2e-6, 'kda': 5e-6}
"""With float32 states and records."""


@pytest.fixture(params=['tma', 'cp.async'])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """The fused kernel by every way in which this GPU can copy its tiles."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0) or (request.param == 'tma' and capability != (9, 0)):
        pytest.skip(f'tiles do not come by {request.param} with compute capability {capability}')
    return cast('Kernel', request.param)


def packed_trial(
    shape: Shape, batch: int, checkpoint: str = 'float32', record: str = 'float32', slot_bytes: int = 0
) -> Trial:
    """A trial on a packed pool, rings full of NaN."""
    trial = shape.trial(batch, 'cuda', torch.bfloat16, checkpoint, record)
    (state,) = packed_layers(trial.layout, batch + 3, 'cuda', slot_bytes)
    for packed, loose in zip(state, trial.state, strict=True):
        packed.copy_(loose)
    trial.state = state
    return trial


@pytest.mark.parametrize('dtypes', DTYPES, ids='-'.join)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_outputs_equal_the_float64_recurrence(shape: Shape, dtypes: tuple[str, str], kernel: Kernel) -> None:
    trial = packed_trial(shape, 7, *dtypes)
    trial.slots[3] = -1
    bounds = {DTYPES[0]: FLOAT32_BOUND[shape.layer], ('bfloat16', 'float32'): 6e-3}
    with trial.leaving_other_slots_alone():
        for _ in range(3 * (shape.L + shape.T)):
            assert trial.step(to_float32(forced(kernel, shape))) < bounds.get(dtypes, 8e-3)
    assert trial.flushes >= 2 * (trial.batch - 1)


@pytest.mark.parametrize('accepts', [(1, 2, 3, 4), (4, 3, 2, 1), (4,), (1,)], ids=str)
@both_layers
def test_mixed_lengths_and_accepts(kind: Kind, accepts: tuple[int, ...], kernel: Kernel) -> None:
    shape = WINDOWS[kind][3]
    trial = packed_trial(shape, batch=4)
    for i in range(64):
        lengths = torch.tensor([1, 4, 2, 3]).roll(i)
        assert (
            trial.step(to_float32(forced(kernel, shape)), lengths, torch.full((4,), accepts[i % len(accepts)]))
            < FLOAT32_BOUND[shape.layer]
        )


@both_layers
def test_slots_past_two_to_the_thirty_one_elements(kind: Kind, kernel: Kernel) -> None:
    shape = kind(H=1, HV=1, K=64, V=64, L=4, T=2)
    trial = packed_trial(shape, 3, slot_bytes=2**32 - 2**20)
    assert max(trial.step(to_float32(forced(kernel, shape))) for _ in range(12)) < FLOAT32_BOUND[shape.layer]


@pytest.mark.parametrize('dtypes', [DTYPES[0], DTYPES[3]], ids='-'.join)
@pytest.mark.parametrize('window', [1, 4, 8])
@both_layers
def test_two_thousand_repeats_are_bit_identical(
    kind: Kind, window: int, dtypes: tuple[str, str], kernel: Kernel
) -> None:
    """Programs of one launch neither read what another one appends nor share memory by accident."""
    shape = kind(H=8 if kind is Shape else 16, HV=16, K=128, V=128, L=16, T=window)
    trial = packed_trial(shape, 32, *dtypes)
    for tensor in trial.state:
        tensor.normal_()
    trial.state.key_norm.fill_(shape.K**-0.5)
    if shape.gate == 'scalar':
        trial.state.gate.uniform_(-0.2, 0)
    start = [tensor.clone() for tensor in trial.state]
    inputs = trial.inputs()
    lengths = torch.full_like(trial.history, shape.T)
    history = trial.positions[trial.slots, 0].long() + torch.arange(32, device='cuda') % (shape.L + 1)
    rows = trial.layout.ring_rows
    table = advance_decode(trial.slots, history, lengths, trial.positions[trial.slots], shape.L, rows).table
    first: list[torch.Tensor] = []
    differing = torch.zeros((), dtype=torch.long, device='cuda')
    for _ in range(2000):
        for tensor, value in zip(trial.state, start, strict=True):
            tensor.copy_(value)
        out = trial.decode(forced(kernel, shape), table, inputs)
        results = [out, *(tensor.contiguous() for tensor in trial.state)]
        first = first or [tensor.clone() for tensor in results]
        for tensor, expected in zip(results, first, strict=True):
            differing += (tensor.view(torch.int16) != expected.view(torch.int16)).any()
    assert differing.item() == 0
    assert torch.isfinite(first[0]).all()


@pytest.mark.parametrize('selected', [False, True], ids=['forced', 'selected'])
@pytest.mark.parametrize('window', [1, 4])
@both_layers
def test_a_captured_step_advances_when_replayed(kind: Kind, window: int, selected: bool, kernel: Kernel) -> None:
    """Cursors, kernel and positions in one CUDA graph; capture itself advances nothing."""
    shape = replace(WINDOWS[kind][window - 1], L=8)
    launcher = resolve(f'replayssm.{shape.layer}.decode.replay_decode')
    decode = to_float32(launcher if selected else forced(kernel, shape))
    trial = packed_trial(shape, batch=5)
    inputs = trial.inputs()
    slots, lengths, history = trial.slots.clone(), torch.full_like(trial.history, window), trial.history.clone()

    def step() -> torch.Tensor:
        advance = advance_decode(slots, history, lengths, trial.positions[slots], shape.L, trial.layout.ring_rows)
        out = trial.decode(decode, advance.table, inputs)
        trial.positions[slots] = advance.positions
        history.add_(lengths)
        return out

    saved = [tensor.clone() for tensor in (*trial.state, trial.positions, history)]
    stream = torch.cuda.Stream()
    # the copies above are made by another stream, which may be late
    stream.wait_stream(torch.cuda.current_stream())
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
        assert (out.double() - outputs).norm() / outputs.norm() < FLOAT32_BOUND[shape.layer]
        expected = states[:, -1]
    assert torch.equal(history, saved[-1] + 30 * window)


@both_layers
def test_a_descriptor_keeps_no_memory_alive(kind: Kind, kernel: Kernel) -> None:
    shape = WINDOWS[kind][0]
    trial = packed_trial(shape, batch=64)
    trial.step(to_float32(forced(kernel, shape)))
    state_bytes = sum(tensor.untyped_storage().nbytes() for tensor in trial.state[:1])
    nothing = LayerState(*[torch.empty(0, device='cuda')] * 5)
    before = torch.cuda.memory_allocated()
    trial.state = nothing
    assert torch.cuda.memory_allocated() <= before - state_bytes
