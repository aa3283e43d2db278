"""A random life of a decoding batch, replayed by the function under test and by the plain recurrence in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from replayssm.config import ReplayConfig
from replayssm.cursor import FLUSH, advance_decode
from replayssm.gdn.reference import gates, recurrence
from replayssm.layout import Gate, LayerState, StateLayout

Decode = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Heads, head dimensions, buffer and window of a trial."""

    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 16
    L: int = 8
    T: int = 1

    def __str__(self) -> str:
        return f'H{self.H}-HV{self.HV}-K{self.K}-V{self.V}-L{self.L}-T{self.T}'

    def layout(
        self,
        activation: torch.dtype = torch.float32,
        checkpoint: str = 'float32',
        record: str = 'float32',
        gate: Gate = 'scalar',
    ) -> StateLayout:
        config = ReplayConfig(self.L, checkpoint, record)  # type: ignore[arg-type]
        conv = (1, 4, 4)
        return StateLayout(1, self.H, self.HV, self.K, self.V, conv, activation, activation, self.T - 1, config, gate)


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

    @property
    def options(self) -> tuple[float | None, ...]:
        """Arguments of the function under test behind the cursors."""
        return ()

    def gate_logits(self) -> torch.Tensor:
        return self.normal(self.batch, self.shape.T, self.shape.HV)

    def gates(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
        return gates(a, b, self.neg_exp_a.to(dtype), self.dt_bias)

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
        q, k, v, a, b = self.inputs()
        advance = advance_decode(
            self.slots, self.history, lengths, self.positions[self.slots.clamp_min(0)], s.L, self.layout.ring_rows
        )
        out = decode(q, k, v, a, b, self.neg_exp_a, self.dt_bias, self.state, advance.table, *self.options)
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
