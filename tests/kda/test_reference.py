"""Replay with vector gates against the plain recurrence in float64, over random lives of accepts and flushes."""

from __future__ import annotations

import pytest
import torch

from replayssm.cursor import CURSOR_COLUMNS, advance_decode, read_prefill
from replayssm.gdn.reference import recurrence
from replayssm.kda.reference import gates, materialise, replay_decode

from .decode_trial import Shape, Trial

SHAPES = [
    Shape(),
    Shape(bound=None),
    Shape(L=1),
    Shape(L=16, H=2, HV=2, K=32, V=32),
    Shape(H=2, HV=6, K=16, V=48),
    Shape(H=3, HV=3, K=24, V=8, L=5, bound=None),
    Shape(T=2, L=4),
    Shape(T=4, L=4),
    Shape(T=4, L=16, H=2, HV=6, K=16, V=48, bound=None),
    Shape(T=8, L=11),
]


@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_outputs_equal_the_float64_recurrence(shape: Shape) -> None:
    trial = Trial(shape, batch=5, layout=shape.layout())
    worst = max(trial.step(replay_decode) for _ in range(6 * (shape.L + shape.T)))
    assert trial.flushes > 2 * trial.batch
    assert worst < 2e-5


@pytest.mark.parametrize('shape', [Shape(), Shape(T=4, L=9, bound=None)], ids=str)
def test_float64_records_are_exact(shape: Shape) -> None:
    trial = Trial(shape, batch=3, layout=shape.layout(torch.float64))
    trial.state = type(trial.state)(*(tensor.double() for tensor in trial.state))
    trial.neg_exp_a = trial.neg_exp_a.double()
    assert max(trial.step(replay_decode) for _ in range(60)) < 1e-12


@pytest.mark.parametrize(
    ('checkpoint', 'record', 'bound'),
    [('float32', 'bfloat16', 6e-3), ('bfloat16', 'bfloat16', 8e-3), ('bfloat16', 'float32', 6e-3)],
)
def test_reduced_precision_state_stays_within_its_rounding(checkpoint: str, record: str, bound: float) -> None:
    shape = Shape(K=32, V=32, T=2)
    trial = Trial(shape, batch=4, layout=shape.layout(torch.bfloat16, checkpoint, record))
    worst = max(trial.step(lambda q, k, v, *rest: replay_decode(q, k, v.float(), *rest)) for _ in range(80))
    assert 1e-5 < worst < bound


@pytest.mark.parametrize('bound', [None, -5.0])
def test_gate_records_in_bfloat16_lose_nothing(bound: float | None) -> None:
    """Records of bfloat16 logits, with everything else in float32, are as exact as float32 records."""
    shape = Shape(T=2, L=16, bound=bound)
    trial = Trial(shape, batch=3, layout=shape.layout())
    trial.state = trial.state._replace(gate=trial.state.gate.bfloat16())

    def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, *rest: object) -> torch.Tensor:
        a.copy_(a.bfloat16())
        return replay_decode(q, k, v, a, *rest)  # type: ignore[arg-type]

    assert max(trial.step(decode) for _ in range(60)) < 2e-5


def test_padding_rows_and_slots_outside_the_batch_stay_untouched() -> None:
    shape = Shape(T=4, L=6)
    trial = Trial(shape, batch=4, layout=shape.layout())
    trial.slots[2] = -1
    with trial.leaving_other_slots_alone():
        for _ in range(30):
            assert trial.step(replay_decode) < 2e-5


def test_an_all_padding_batch_is_a_no_op() -> None:
    shape = Shape()
    trial = Trial(shape, batch=2, layout=shape.layout())
    before = [tensor.clone() for tensor in trial.state]
    table = torch.full((2, CURSOR_COLUMNS), -1, dtype=torch.int32)
    out = replay_decode(*trial.inputs(), trial.neg_exp_a, trial.dt_bias, trial.state, table, *trial.options)
    assert not out.any()
    assert all(torch.equal(t.nan_to_num(7.0), s.nan_to_num(7.0)) for t, s in zip(trial.state, before, strict=True))


def test_windows_of_mixed_length() -> None:
    """Windows of 1, 4, 2 tokens in turn, and of different length in one batch."""
    shape = Shape(T=4, L=7)
    trial = Trial(shape, batch=4, layout=shape.layout())
    for i in range(60):
        lengths = torch.tensor([1, 4, 2, 3]).roll(i)
        assert trial.step(replay_decode, lengths) < 2e-5


@pytest.mark.parametrize('order', [(1, 2, 3, 4), (4, 3, 2, 1), (1, 4, 1, 4), (4, 4, 4, 4), (1, 1, 1, 1)])
def test_accept_counts_in_every_order(order: tuple[int, ...]) -> None:
    shape = Shape(T=4, L=8)
    trial = Trial(shape, batch=3, layout=shape.layout())
    for i in range(48):
        accepts = torch.full((3,), order[i % len(order)])
        assert trial.step(replay_decode, accepts=accepts) < 2e-5


@pytest.mark.parametrize('steps', range(12))
def test_materialised_states_equal_the_recurrence_at_any_cursor(steps: int) -> None:
    shape = Shape(T=3, L=7)
    trial = Trial(shape, batch=3, layout=shape.layout())
    for _ in range(steps):
        trial.step(replay_decode)
    table = read_prefill(trial.slots, trial.history, trial.positions[trial.slots], trial.layout.ring_rows)
    states = materialise(trial.state, table, trial.neg_exp_a, trial.dt_bias, shape.bound)
    torch.testing.assert_close(states.double(), trial.expected, rtol=1e-5, atol=1e-5)


def test_a_copied_slot_with_pending_records_continues_identically() -> None:
    shape = Shape(T=2, L=6)
    trial = Trial(shape, batch=3, layout=shape.layout())
    for _ in range(5):
        trial.step(replay_decode)
    for tensor in (*trial.state, trial.positions):
        tensor[4] = tensor[2]
    kept, history, expected = [t[4].clone() for t in trial.state], trial.history[1].clone(), trial.expected[1].clone()
    for _ in range(9):
        trial.step(replay_decode)
    assert all(torch.equal(t[4].nan_to_num(7.0), k.nan_to_num(7.0)) for t, k in zip(trial.state, kept, strict=True))
    trial.slots, trial.history = torch.tensor([4, -1, -1]), history.repeat(3)
    trial.expected = expected.repeat(3, 1, 1, 1)
    assert max(trial.step(replay_decode) for _ in range(12)) < 2e-5


def test_a_recycled_slot_full_of_infinities_starts_clean() -> None:
    """A prefill of a new sequence ignores whatever the slot's last owner left; no gate could forget it."""
    shape = Shape()
    trial = Trial(shape, batch=2, layout=shape.layout())
    for tensor in trial.state:
        tensor.fill_(float('inf'))
    trial.positions.fill_(123456)
    table = read_prefill(trial.slots, torch.zeros(2), trial.positions[trial.slots], trial.layout.ring_rows)
    assert not materialise(trial.state, table, trial.neg_exp_a, trial.dt_bias, shape.bound).any()


def test_the_bound_multiplies_and_does_not_clamp() -> None:
    a, rate = torch.tensor([[[-40.0, 0.0, 40.0]]]), torch.tensor([-2.0])
    g, _ = gates(a, torch.zeros(1, 1), rate, torch.zeros(1, 3), lower_bound=-5.0)
    torch.testing.assert_close(g, torch.tensor([[[0.0, -2.5, -5.0]]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize('bound', [None, -5.0])
def test_gates_equal_transformers(bound: float | None) -> None:
    torch.manual_seed(0)
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextConfig, Glm5NextTextForgetGate

    config = Glm5NextTextConfig(hidden_size=24, linear_num_heads=3, linear_head_dim=8, num_hidden_layers=4)
    config.linear_lower_bound = bound
    module = Glm5NextTextForgetGate(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 5, 24)
    raw = module.f_b_proj(module.f_a_proj(x)).unflatten(-1, (3, 8))
    g, _ = gates(raw, raw[..., 0], -module.A_log.exp(), module.dt_bias.view(3, 8), bound)
    torch.testing.assert_close(g, module(x), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize('bound', [None, -5.0])
def test_state_after_4096_steps_is_as_good_as_the_plain_float32_recurrence(bound: float | None) -> None:
    """Folding rounded records over and over must not drift further than rounding the state at every token."""
    shape = Shape(H=2, HV=2, K=32, V=32, L=16, T=1, bound=bound)
    trial = Trial(shape, batch=1, layout=shape.layout())
    # Channels from forgetting within a few tokens to remembering thousands.
    trial.dt_bias = torch.linspace(-9.0, 0.0, shape.K).expand(shape.HV, -1).contiguous()
    trial.neg_exp_a = -torch.tensor([1.0, 0.8])
    plain = trial.expected.float()
    for _ in range(4096):
        q, k, v, a, b = trial.inputs()
        one = torch.ones_like(trial.history)
        advance = advance_decode(trial.slots, trial.history, one, trial.positions[trial.slots], 16, 17)
        replay_decode(q, k, v, a, b, trial.neg_exp_a, trial.dt_bias, trial.state, advance.table, *trial.options)
        trial.positions[trial.slots], trial.history = advance.positions, trial.history + 1
        trial.expected = recurrence(q, k, v, *trial.gates(a, b), trial.expected)[1][:, -1]
        plain = recurrence(q, k, v, *trial.gates(a, b, torch.float32), plain)[1][:, -1]
    table = read_prefill(trial.slots, trial.history, trial.positions[trial.slots], 17)
    ours, theirs = (
        float((state.double() - trial.expected).norm() / trial.expected.norm())
        for state in (materialise(trial.state, table, trial.neg_exp_a, trial.dt_bias, bound), plain)
    )
    assert ours < 1.5 * theirs
