"""What only a GPU shows: the Hopper kernel's shapes, races, CUDA graphs, addresses past 2^31 and long decodes."""

from __future__ import annotations

import pytest
import torch

from replayssm.cursor import advance_decode, read_prefill
from replayssm.gdn import decode
from replayssm.gdn.reference import gates, materialise, recurrence
from replayssm.layout import LayerState

from .decode_trial import Shape, Trial
from .state_pool import packed_layers

pytestmark = pytest.mark.cuda

HEADS = {'H': 2, 'HV': 6}
SHAPES = [
    *(Shape(**HEADS, K=128, V=128, L=16, T=t) for t in range(1, 9)),
    Shape(**HEADS, K=64, V=64, L=16),
    Shape(**HEADS, K=64, V=256, L=5, T=4),
    Shape(**HEADS, K=256, V=64, L=32, T=4),
    Shape(**HEADS, K=256, V=256, L=32, T=8),
    Shape(**HEADS, K=128, V=256, L=1),
    Shape(H=3, HV=3, K=128, V=64, L=9, T=2),
]
DTYPES = [('float32', 'float32'), ('float32', 'bfloat16'), ('bfloat16', 'float32'), ('bfloat16', 'bfloat16')]
BOUND = {('float32', 'float32'): 2e-6, ('bfloat16', 'float32'): 6e-3}


def to_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> torch.Tensor:
    """The selected kernel with float32 outputs, which shows errors below the activations' rounding."""
    return decode.replay_decode(q, k, v.float(), *rest)  # type: ignore[arg-type]


def packed_trial(shape: Shape, batch: int, checkpoint: str = 'float32', record: str = 'float32') -> Trial:
    """A trial on a packed pool, rings full of NaN."""
    trial = Trial(shape, batch, shape.layout(torch.bfloat16, checkpoint, record), 'cuda')
    (state,) = packed_layers(trial.layout, batch + 3, 'cuda')
    for packed, loose in zip(state, trial.state, strict=True):
        packed.copy_(loose)
    trial.state = state
    return trial


@pytest.mark.parametrize('dtypes', DTYPES, ids='-'.join)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_outputs_equal_the_float64_recurrence(shape: Shape, dtypes: tuple[str, str]) -> None:
    trial = packed_trial(shape, 7, *dtypes)
    trial.slots[3] = -1
    bound = BOUND.get(dtypes, 8e-3)
    with trial.leaving_other_slots_alone():
        for _ in range(3 * (shape.L + shape.T)):
            assert trial.step(to_float32) < bound
    assert trial.flushes >= 2 * (trial.batch - 1)


@pytest.mark.parametrize('accepts', [(1, 2, 3, 4), (4, 3, 2, 1), (4,), (1,)], ids=str)
def test_mixed_lengths_and_accepts(accepts: tuple[int, ...]) -> None:
    trial = packed_trial(Shape(**HEADS, K=128, V=128, L=16, T=4), batch=4)
    for i in range(64):
        lengths = torch.tensor([1, 4, 2, 3]).roll(i)
        assert trial.step(to_float32, lengths, torch.full((4,), accepts[i % len(accepts)])) < 2e-6


def test_slots_past_two_to_the_thirty_one_elements() -> None:
    shape = Shape(H=1, HV=1, K=64, V=64, L=4, T=2)
    trial = Trial(shape, 3, shape.layout(torch.bfloat16), 'cuda')
    (state,) = packed_layers(trial.layout, 6, 'cuda', slot_bytes=2**32 - 2**20)
    for packed, loose in zip(state, trial.state, strict=True):
        packed.copy_(loose)
    trial.state = state
    assert max(trial.step(to_float32) for _ in range(12)) < 2e-6


@pytest.mark.parametrize('dtypes', [DTYPES[0], DTYPES[3]], ids='-'.join)
@pytest.mark.parametrize('shape', [SHAPES[0], SHAPES[3], SHAPES[7]], ids=str)
def test_two_thousand_repeats_are_bit_identical(shape: Shape, dtypes: tuple[str, str]) -> None:
    """Programs of one launch neither read what another one appends nor share memory by accident."""
    wide = Shape(H=8, HV=16, K=shape.K, V=shape.V, L=shape.L, T=shape.T)
    trial = packed_trial(wide, 32, *dtypes)
    for tensor in trial.state:
        tensor.normal_()
    trial.state.key_norm.fill_(wide.K**-0.5)
    trial.state.gate.uniform_(-0.2, 0)
    start = [tensor.clone() for tensor in trial.state]
    inputs = trial.inputs()
    lengths = torch.full_like(trial.history, wide.T)
    history = trial.positions[trial.slots, 0].long() + torch.arange(32, device='cuda') % (wide.L + 1)
    table = advance_decode(
        trial.slots, history, lengths, trial.positions[trial.slots], wide.L, trial.layout.ring_rows
    ).table
    first: list[torch.Tensor] = []
    differing = torch.zeros((), dtype=torch.long, device='cuda')
    for _ in range(2000):
        for tensor, value in zip(trial.state, start, strict=True):
            tensor.copy_(value)
        out = decode.replay_decode(*inputs, trial.neg_exp_a, trial.dt_bias, trial.state, table)
        results = [out, *(tensor.contiguous() for tensor in trial.state)]
        first = first or [tensor.clone() for tensor in results]
        for tensor, expected in zip(results, first, strict=True):
            differing += (tensor.view(torch.int16) != expected.view(torch.int16)).any()
    assert differing.item() == 0
    assert torch.isfinite(first[0]).all()


@pytest.mark.parametrize('window', [1, 4])
def test_a_captured_step_advances_when_replayed(window: int) -> None:
    """Cursors, kernel and positions in one CUDA graph; capture itself advances nothing."""
    shape = Shape(**HEADS, K=128, V=128, L=8, T=window)
    trial = packed_trial(shape, batch=5)
    inputs = trial.inputs()
    slots, lengths = trial.slots.clone(), torch.full_like(trial.history, window)
    history = trial.history.clone()

    def step() -> torch.Tensor:
        advance = advance_decode(slots, history, lengths, trial.positions[slots], shape.L, trial.layout.ring_rows)
        out = to_float32(*inputs, trial.neg_exp_a, trial.dt_bias, trial.state, advance.table)
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
        g, beta = gates(*inputs[3:], trial.neg_exp_a.double(), trial.dt_bias)
        outputs, states = recurrence(*inputs[:3], g, beta, expected)
        assert (out.double() - outputs).norm() / outputs.norm() < 2e-6
        expected = states[:, -1]
    assert torch.equal(history, saved[-1] + 30 * window)


def test_8192_steps_drift_no_more_than_the_stock_kernel() -> None:
    """Relative state error against float64 after 8,192 tokens, on gates like a trained model's."""
    stock = pytest.importorskip('lmdeploy.pytorch.kernels.cuda.gated_delta_rule').fused_recurrent_gated_delta_rule
    shape = Shape(H=8, HV=16, K=128, V=128, L=16)
    layout = shape.layout(torch.bfloat16)
    (state,) = packed_layers(layout, 3, 'cuda')
    stock_state = torch.zeros(3, shape.HV, shape.V, shape.K, device='cuda')
    exact = torch.zeros(2, shape.HV, shape.V, shape.K, dtype=torch.float64, device='cuda')
    slots = torch.arange(1, 3, device='cuda')
    history, positions = torch.zeros_like(slots), torch.zeros(2, 2, dtype=torch.int32, device='cuda')
    # time constants of 1 to 1,000 tokens: A in 1..16, softplus(dt_bias) in 0.001..0.1
    neg_exp_a = -torch.linspace(0.0, 2.77, shape.HV, device='cuda').exp()
    dt_bias = torch.linspace(-2.3, -6.9, shape.HV, device='cuda')
    torch.manual_seed(0)
    for _ in range(8192):
        q, k = (torch.randn(2, 1, shape.H, shape.K, device='cuda').bfloat16() for _ in range(2))
        v = torch.randn(2, 1, shape.HV, shape.V, device='cuda').bfloat16()
        a, b = ((torch.randn(2, 1, shape.HV, device='cuda') / 2).bfloat16() for _ in range(2))
        advance = advance_decode(slots, history, torch.ones_like(slots), positions, shape.L, layout.ring_rows)
        decode.replay_decode(q, k, v, a, b, neg_exp_a, dt_bias, state, advance.table)
        positions, history = advance.positions, history + 1
        g, beta = gates(a, b, neg_exp_a, dt_bias)
        stock(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=stock_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            state_indices=slots,
            transpose_state_layout=True,
        )
        g, beta = gates(a, b, neg_exp_a.double(), dt_bias)
        exact = recurrence(q, k, v, g, beta, exact)[1][:, -1]
    ours = materialise(state, read_prefill(slots, history, positions, layout.ring_rows), torch.float64)
    error, stock_error = ((s - exact).norm() / exact.norm() for s in (ours, stock_state[slots].double()))
    print(f'relative state error after 8,192 tokens: ours {error:.2e}, stock {stock_error:.2e}')
    assert error < 1.5 * stock_error
    assert error < 1e-6


def test_a_descriptor_keeps_no_memory_alive() -> None:
    shape = Shape(**HEADS, K=128, V=128, L=16)
    trial = packed_trial(shape, batch=64)
    trial.step(to_float32)
    state_bytes = sum(tensor.untyped_storage().nbytes() for tensor in trial.state[:1])
    nothing = LayerState(*[torch.empty(0, device='cuda')] * 5)
    before = torch.cuda.memory_allocated()
    trial.state = nothing
    assert torch.cuda.memory_allocated() <= before - state_bytes
