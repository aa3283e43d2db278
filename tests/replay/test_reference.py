"""Replay against the plain recurrence in float64: every output of a random life of accepts, rejects and flushes."""

from __future__ import annotations

import pytest
import torch

from replayssm.cursor import CURSOR_COLUMNS
from replayssm.gdn.reference import recurrence

from .trial import KdaShape, Kind, Shape, Trial, both_layers

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
    KdaShape(),
    KdaShape(bound=None),
    KdaShape(L=1),
    KdaShape(L=16, H=2, HV=2, K=32, V=32),
    KdaShape(H=2, HV=6, K=16, V=48),
    KdaShape(H=3, HV=3, K=24, V=8, L=5, bound=None),
    KdaShape(T=2, L=4),
    KdaShape(T=4, L=4),
    KdaShape(T=4, L=16, H=2, HV=6, K=16, V=48, bound=None),
    KdaShape(T=8, L=11),
]


def step(trial: Trial, lengths: torch.Tensor | None = None, accepts: torch.Tensor | None = None) -> float:
    return trial.step(trial.shape.reference.replay_decode, lengths, accepts)


def materialised(trial: Trial) -> torch.Tensor:
    states: torch.Tensor = trial.shape.reference.materialise(*trial.materialise_operands())
    return states


@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_outputs_equal_the_float64_recurrence(shape: Shape) -> None:
    trial = shape.trial(5)
    worst = max(step(trial) for _ in range(6 * (shape.L + shape.T)))
    assert trial.flushes > 2 * trial.batch
    assert worst < 2e-5


@pytest.mark.parametrize('shape', [Shape(), Shape(T=4, L=9), KdaShape(), KdaShape(T=4, L=9, bound=None)], ids=str)
def test_float64_records_are_exact(shape: Shape) -> None:
    trial = shape.trial(3, 'cpu', torch.float64)
    trial.state = type(trial.state)(*(tensor.double() for tensor in trial.state))
    trial.neg_exp_a = trial.neg_exp_a.double()
    assert max(step(trial) for _ in range(60)) < 1e-12


@pytest.mark.parametrize(
    ('checkpoint', 'record', 'bound'),
    [('float32', 'bfloat16', 6e-3), ('bfloat16', 'bfloat16', 8e-3), ('bfloat16', 'float32', 6e-3)],
)
@both_layers
def test_reduced_precision_state_stays_within_its_rounding(
    kind: Kind, checkpoint: str, record: str, bound: float
) -> None:
    trial = kind(K=32, V=32, T=2).trial(4, 'cpu', torch.bfloat16, checkpoint, record)
    decode = trial.shape.reference.replay_decode
    worst = max(trial.step(lambda q, k, v, *rest: decode(q, k, v.float(), *rest)) for _ in range(80))
    assert 1e-5 < worst < bound


@both_layers
def test_padding_rows_and_slots_outside_the_batch_stay_untouched(kind: Kind) -> None:
    trial = kind(T=4, L=6).trial(4)
    trial.slots[2] = -1
    with trial.leaving_other_slots_alone():
        for _ in range(30):
            assert step(trial) < 2e-5


@both_layers
def test_an_all_padding_batch_is_a_no_op(kind: Kind) -> None:
    trial = kind().trial(2)
    trial.slots.fill_(-1)
    with trial.leaving_other_slots_alone():
        table = torch.full((2, CURSOR_COLUMNS), -1, dtype=torch.int32)
        assert not trial.decode(trial.shape.reference.replay_decode, table, trial.inputs()).any()


@both_layers
def test_windows_of_mixed_length(kind: Kind) -> None:
    """Windows of 1, 4, 2 tokens in turn, and of different length in one batch."""
    trial = kind(T=4, L=7).trial(4)
    for i in range(60):
        assert step(trial, torch.tensor([1, 4, 2, 3]).roll(i)) < 2e-5


@pytest.mark.parametrize('order', [(1, 2, 3, 4), (4, 3, 2, 1), (1, 4, 1, 4), (4, 4, 4, 4), (1, 1, 1, 1)])
@both_layers
def test_accept_counts_in_every_order(kind: Kind, order: tuple[int, ...]) -> None:
    trial = kind(T=4, L=8).trial(3)
    for i in range(48):
        assert step(trial, accepts=torch.full((3,), order[i % len(order)])) < 2e-5


@pytest.mark.parametrize('steps', range(12))
@both_layers
def test_materialised_states_equal_the_recurrence_at_any_cursor(kind: Kind, steps: int) -> None:
    trial = kind(T=3, L=7).trial(3)
    for _ in range(steps):
        step(trial)
    torch.testing.assert_close(materialised(trial).double(), trial.expected, rtol=1e-5, atol=1e-5)


@both_layers
def test_a_copied_slot_with_pending_records_continues_identically(kind: Kind) -> None:
    trial = kind(T=2, L=6).trial(3)
    for _ in range(5):
        step(trial)
    for tensor in (*trial.state, trial.positions):
        tensor[4] = tensor[2]
    history, expected = trial.history[1].clone(), trial.expected[1].clone()
    with trial.leaving_other_slots_alone():
        for _ in range(9):
            step(trial)
    trial.slots, trial.history = torch.tensor([4, -1, -1]), history.repeat(3)
    trial.expected = expected.repeat(3, 1, 1, 1)
    assert max(step(trial) for _ in range(12)) < 2e-5


@both_layers
def test_a_recycled_slot_full_of_infinities_starts_clean(kind: Kind) -> None:
    """A prefill of a new sequence ignores whatever the slot's last owner left; a bounded gate could not forget it."""
    trial = kind().trial(2)
    for tensor in trial.state:
        tensor.fill_(float('inf'))
    trial.positions.fill_(123456)
    trial.history.zero_()
    assert not materialised(trial).any()


@both_layers
def test_records_survive_repeated_rollback_of_the_same_window(kind: Kind) -> None:
    """The same window is verified again after all but its first token was rejected: rollback is consumed once."""
    trial = kind(T=4, L=16).trial(2)
    for _ in range(12):
        assert int(trial.advance(torch.full_like(trial.history, 4)).rejected) in (0, 6)
        assert step(trial, accepts=torch.tensor([1, 1])) < 2e-5


FORGETTING = {
    # from forgetting within a few tokens to remembering thousands, by heads or by channels
    Shape(K=32, V=32, L=16): (-torch.tensor([1.0, 0.1, 0.01, 0.001]), None),
    KdaShape(H=2, HV=2, K=32, V=32, L=16): (-torch.tensor([1.0, 0.8]), torch.linspace(-9.0, 0.0, 32)),
    KdaShape(H=2, HV=2, K=32, V=32, L=16, bound=None): (-torch.tensor([1.0, 0.8]), torch.linspace(-9.0, 0.0, 32)),
}


@pytest.mark.parametrize('shape', FORGETTING, ids=str)
def test_state_after_8192_steps_is_as_good_as_the_plain_float32_recurrence(shape: Shape) -> None:
    """Folding rounded records over and over must not drift further than rounding the state at every token."""
    trial = shape.trial(1)
    trial.neg_exp_a, dt_bias = FORGETTING[shape]
    trial.dt_bias = trial.dt_bias if dt_bias is None else dt_bias.expand(shape.HV, -1).contiguous()
    plain = trial.expected.float()
    one = torch.ones_like(trial.history)
    for _ in range(8192):
        q, k, v, a, b = inputs = trial.inputs()
        advance = trial.advance(one)
        trial.decode(shape.reference.replay_decode, advance.table, inputs)
        trial.positions[trial.slots], trial.history = advance.positions, trial.history + 1
        trial.expected = recurrence(q, k, v, *trial.gates(a, b), trial.expected)[1][:, -1]
        plain = recurrence(q, k, v, *trial.gates(a, b, torch.float32), plain)[1][:, -1]
    ours, theirs = (
        float((state.double() - trial.expected).norm() / trial.expected.norm())
        for state in (materialised(trial), plain)
    )
    assert ours < 1.5 * theirs
