"""Replay against the plain recurrence in float64: every output of a random life of accepts, rejects and flushes."""

from __future__ import annotations

import pytest
import torch

from replayssm.cursor import CURSOR_COLUMNS, advance_decode, read_prefill
from replayssm.gdn.reference import gates, materialise, recurrence, replay_decode

from .decode_trial import Shape, Trial

SHAPES = [
    Shape(),
    Shape(L=1),
    Shape(L=16, K=32, V=32),
    Shape(H=2, HV=6, K=16, V=48),
    Shape(H=3, HV=3, K=24, V=8, L=5),
    Shape(T=2, L=4),
    Shape(T=4, L=4),
    Shape(T=4, L=16, H=2, HV=6, K=16, V=48),
    Shape(T=8, L=11),
]


@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_outputs_equal_the_float64_recurrence(shape: Shape) -> None:
    trial = Trial(shape, batch=5, layout=shape.layout())
    worst = max(trial.step(replay_decode) for _ in range(6 * (shape.L + shape.T)))
    assert trial.flushes > 2 * trial.batch
    assert worst < 2e-5


@pytest.mark.parametrize('shape', [Shape(), Shape(T=4, L=9)], ids=str)
def test_float64_records_are_exact(shape: Shape) -> None:
    layout = shape.layout(torch.float64)
    trial = Trial(shape, batch=3, layout=layout)
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


def test_padding_rows_and_slots_outside_the_batch_stay_untouched() -> None:
    shape = Shape(T=4, L=6)
    trial = Trial(shape, batch=4, layout=shape.layout())
    trial.slots[2] = -1
    with trial.leaving_other_slots_alone():
        for _ in range(30):
            trial.step(replay_decode)


def test_an_all_padding_batch_is_a_no_op() -> None:
    shape = Shape()
    trial = Trial(shape, batch=2, layout=shape.layout())
    trial.slots.fill_(-1)
    before = [tensor.clone() for tensor in trial.state]
    q, k, v, a, b = trial.inputs()
    table = torch.full((2, CURSOR_COLUMNS), -1, dtype=torch.int32)
    out = replay_decode(q, k, v, a, b, trial.neg_exp_a, trial.dt_bias, trial.state, table)
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
    torch.testing.assert_close(materialise(trial.state, table).double(), trial.expected, rtol=1e-5, atol=1e-5)


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
    """A prefill of a new sequence ignores whatever the slot's last owner left."""
    shape = Shape()
    trial = Trial(shape, batch=2, layout=shape.layout())
    for tensor in trial.state:
        tensor.fill_(float('inf'))
    trial.positions.fill_(123456)
    table = read_prefill(trial.slots, torch.zeros(2), trial.positions[trial.slots], trial.layout.ring_rows)
    assert not materialise(trial.state, table).any()


def test_records_survive_repeated_rollback_of_the_same_window() -> None:
    """The same window is verified again after all but its first token was rejected: rollback is consumed once."""
    shape = Shape(T=4, L=16)
    trial = Trial(shape, batch=2, layout=shape.layout())
    for _ in range(12):
        advance = advance_decode(
            trial.slots, trial.history, torch.full_like(trial.history, 4), trial.positions[trial.slots], 16, 20
        )
        assert int(advance.rejected) in (0, 6)
        assert trial.step(replay_decode, accepts=torch.tensor([1, 1])) < 2e-5


def test_recurrence_returns_every_state() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 4, 6)
    g, beta, state = -torch.rand(2, 5, 4), torch.rand(2, 5, 4), torch.randn(2, 4, 6, 8).double()
    out, states = recurrence(q, k, v, g, beta, state)
    first, _ = recurrence(q[:, :3], k[:, :3], v[:, :3], g[:, :3], beta[:, :3], state)
    rest, _ = recurrence(q[:, 3:], k[:, 3:], v[:, 3:], g[:, 3:], beta[:, 3:], states[:, 2])
    torch.testing.assert_close(out, torch.cat([first, rest], 1))


def test_state_after_8192_steps_is_as_good_as_the_plain_float32_recurrence() -> None:
    """Folding rounded records over and over must not drift further than rounding the state at every token."""
    shape = Shape(K=32, V=32, L=16, T=1)
    trial = Trial(shape, batch=1, layout=shape.layout())
    # Gates like a trained model's: from forgetting within a few tokens to remembering thousands.
    trial.neg_exp_a = -torch.tensor([1.0, 0.1, 0.01, 0.001])
    plain = trial.expected.float()
    for _ in range(8192):
        q, k, v, a, b = trial.inputs()
        one = torch.ones_like(trial.history)
        advance = advance_decode(trial.slots, trial.history, one, trial.positions[trial.slots], 16, 17)
        replay_decode(q, k, v, a, b, trial.neg_exp_a, trial.dt_bias, trial.state, advance.table)
        trial.positions[trial.slots], trial.history = advance.positions, trial.history + 1
        exact = gates(a, b, trial.neg_exp_a.double(), trial.dt_bias)
        trial.expected = recurrence(q, k, v, *exact, trial.expected)[1][:, -1]
        plain = recurrence(q, k, v, *gates(a, b, trial.neg_exp_a, trial.dt_bias), plain)[1][:, -1]
    table = read_prefill(trial.slots, trial.history, trial.positions[trial.slots], 17)
    ours, theirs = (
        float((state.double() - trial.expected).norm() / trial.expected.norm())
        for state in (materialise(trial.state, table), plain)
    )
    assert ours < 1.5 * theirs
