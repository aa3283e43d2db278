"""A random life of a decoding batch, replayed by the function under test and by the plain recurrence in float64.

A shape belongs to a layer: `Shape` to Gated DeltaNet, `KdaShape` to Kimi Delta Attention. Tests of both take either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from replayssm.config import ReplayConfig
from replayssm.cursor import FLUSH, Advance, advance_decode, read_prefill
from replayssm.gdn import reference as gdn_reference
from replayssm.gdn.reference import recurrence
from replayssm.kda import reference as kda_reference
from replayssm.layout import Gate, LayerState, StateLayout

Decode = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Heads, head dimensions, buffer and window of a trial."""

    layer: ClassVar[str] = 'gdn'
    gate: ClassVar[Gate] = 'scalar'
    reference: ClassVar[ModuleType] = gdn_reference

    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 16
    L: int = 8
    T: int = 1

    def __str__(self) -> str:
        return f'{self.layer}-H{self.H}-HV{self.HV}-K{self.K}-V{self.V}-L{self.L}-T{self.T}'

    def layout(
        self, activation: torch.dtype = torch.float32, checkpoint: str = 'float32', record: str = 'float32'
    ) -> StateLayout:
        config = ReplayConfig(self.L, checkpoint, record)  # type: ignore[arg-type]
        heads, dtypes = (self.H, self.HV, self.K, self.V), (activation, activation)
        return StateLayout(1, *heads, (1, 4, 4), *dtypes, self.T - 1, config, self.gate)

    @property
    def options(self) -> tuple[float | None, ...]:
        """Arguments of `replay_decode` behind the cursors."""
        return (self.K**-0.5,)

    def trial(self, batch: int, device: str = 'cpu', *dtypes: Any) -> Trial:
        """A life of `batch` sequences; dtypes as those of `layout`."""
        return TRIALS[self.layer](self, batch, self.layout(*dtypes), device)


@dataclass(frozen=True)
class KdaShape(Shape):
    """With the gates' lower bound; None is the softplus form."""

    layer: ClassVar[str] = 'kda'
    gate: ClassVar[Gate] = 'vector'
    reference: ClassVar[ModuleType] = kda_reference

    bound: float | None = -5.0

    def __str__(self) -> str:
        return f'{super().__str__()}-{"softplus" if self.bound is None else "bounded"}'

    @property
    def options(self) -> tuple[float | None, ...]:
        return (self.K**-0.5, self.bound)


@dataclass
class Trial:
    """Slots 1..B hold the batch in order; slot 0 and the last two belong to nobody and must never change."""

    shape: Shape
    batch: int
    layout: StateLayout
    device: str = 'cpu'
    seed: int = 0
    state: LayerState = field(init=False)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        slots = self.batch + 3
        pools = [torch.empty(slots, *t.shape, dtype=t.dtype, device=self.device) for t in self.layout.tensors()]
        self.state = self.layout.layer(pools, 0)
        for tensor in self.state:
            tensor.fill_(float('nan'))
        self.state.checkpoint[:] = self.normal(*self.state.checkpoint.shape) * 0.3
        self.slots = torch.arange(1, self.batch + 1, device=self.device)
        self.history = torch.randint(0, 5000, (self.batch,), generator=self.random).to(self.device)
        self.positions = torch.zeros(slots, 2, dtype=torch.int32, device=self.device)
        self.positions[self.slots] = self.history.to(torch.int32)[:, None]
        self.neg_exp_a = -(self.normal(self.shape.HV) * 0.5).exp().float()
        self.dt_bias = (self.normal(self.shape.HV) * 0.5).float()
        self.expected = self.state.checkpoint[self.slots].double()
        self.flushes = 0

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """q, k, v as strided views of one projection, like the engine's, and raw gate logits a, b."""
        s, dtype = self.shape, self.layout.activation_dtype
        widths = [s.H * s.K, s.H * s.K, s.HV * s.V]
        q, k, v = self.normal(self.batch, s.T, sum(widths)).to(dtype).split(widths, -1)
        a, b = self.gate_logits().to(dtype), self.normal(self.batch, s.T, s.HV).to(dtype)
        return q.unflatten(-1, (s.H, s.K)), k.unflatten(-1, (s.H, s.K)), v.unflatten(-1, (s.HV, s.V)), a, b

    def gate_logits(self) -> torch.Tensor:
        return self.normal(self.batch, self.shape.T, self.shape.HV)

    def gates(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
        return self.shape.reference.gates(a, b, self.neg_exp_a.to(dtype), self.dt_bias)

    def cursors(self) -> torch.Tensor:
        """Where the states of the batch stand now, as a prefill reads them."""
        positions = self.positions[self.slots.clamp_min(0)]
        return read_prefill(self.slots, self.history, positions, self.layout.ring_rows)

    def materialise_operands(self) -> tuple[Any, ...]:
        """Arguments of `materialise` for the states as they are now."""
        return self.state, self.cursors()

    def advance(self, lengths: torch.Tensor) -> Advance:
        """The cursors of a window of `lengths` tokens."""
        positions = self.positions[self.slots.clamp_min(0)]
        return advance_decode(self.slots, self.history, lengths, positions, self.shape.L, self.layout.ring_rows)

    def decode(self, decode: Decode, table: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """`decode` of `inputs` at the cursors `table`."""
        return decode(*inputs, self.neg_exp_a, self.dt_bias, self.state, table, *self.shape.options)

    @contextmanager
    def leaving_other_slots_alone(self) -> Iterator[None]:
        """Assert that slots which nobody in the batch has are afterwards as they were, NaN included."""
        others = sorted(set(range(len(self.positions))) - set(self.slots.tolist()))
        before = [tensor[others].clone() for tensor in self.state]
        yield
        for tensor, kept in zip(self.state, before, strict=True):
            assert torch.equal(tensor[others].nan_to_num(7.0), kept.nan_to_num(7.0))

    def step(self, decode: Decode, lengths: torch.Tensor | None = None, accepts: torch.Tensor | None = None) -> float:
        """One forward; returns the relative error of its outputs. Accepts are random, 1..length, unless given."""
        s = self.shape
        lengths = torch.full_like(self.history, s.T) if lengths is None else lengths.to(self.device)
        q, k, v, a, b = inputs = self.inputs()
        advance = self.advance(lengths)
        out = self.decode(decode, advance.table, inputs)
        g, beta = self.gates(a, b)
        expected, states = recurrence(q, k, v, g, beta, self.expected)

        live = self.slots >= 0
        inside = (torch.arange(s.T, device=self.device) < lengths[:, None]) & live[:, None]
        assert not bool(out[~inside].any()), 'rows of padding and rows behind the length must be zero'
        error = (out.double() - expected)[inside].norm() / expected[inside].norm()

        if accepts is None:
            accepts = (torch.rand(self.batch, generator=self.random).to(self.device) * lengths).long() + 1
        accepts = torch.minimum(accepts.to(self.device), lengths)
        last = states[torch.arange(self.batch, device=self.device), accepts - 1]
        self.expected = torch.where(live[:, None, None, None], last, self.expected)
        self.positions[self.slots[live]] = advance.positions[live]
        self.history = self.history + torch.where(live, accepts, 0)
        self.flushes += int(advance.table[:, FLUSH].sum())
        return float(error)


@dataclass
class KdaTrial(Trial):
    """`a` is [B, T, HV, K], `dt_bias` [HV, K]."""

    shape: KdaShape

    def __post_init__(self) -> None:
        super().__post_init__()
        # Of a few channels the gate is strong, most forget slowly, as in a trained model.
        self.dt_bias = self.normal(self.shape.HV, self.shape.K) - 2

    def gate_logits(self) -> torch.Tensor:
        return self.normal(self.batch, self.shape.T, self.shape.HV, self.shape.K)

    def gates(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
        return kda_reference.gates(a, b, self.neg_exp_a.to(dtype), self.dt_bias, self.shape.bound)

    def materialise_operands(self) -> tuple[Any, ...]:
        return self.state, self.cursors(), self.neg_exp_a, self.dt_bias, self.shape.bound


TRIALS = {'gdn': Trial, 'kda': KdaTrial}
Kind = type[Shape]
both_layers = pytest.mark.parametrize('kind', [Shape, KdaShape], ids=['gdn', 'kda'])
