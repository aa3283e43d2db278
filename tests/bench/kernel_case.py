"""What a kernel benchmark measures: shapes, dtypes, cursors and the bytes that a launch must move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from replayssm.config import ReplayConfig, StateDtype
from replayssm.cursor import FLUSH, Advance, advance_decode
from replayssm.gdn.operands import Dims
from replayssm.layout import Gate, LayerState, StateLayout
from tests.replay.state_pool import packed_layers

K, V, L = 128, 128, 16
"""Head dimensions of all models so far; L is the default buffer length."""
L2_FACTOR_BYTES = 256 * 2**20
MIN_LAYERS, MAX_LAYERS = 8, 64
"""At least eight launches a CUDA graph, so that starting the graph does not count."""
HISTORY = 1000


class Unavailable(Exception):
    """A contender cannot run this case; the message says why."""


def layers_past_l2(state_bytes: int) -> int:
    """Layers of so many bytes that keep anything from staying in the L2."""
    return max(MIN_LAYERS, min(MAX_LAYERS, -(-L2_FACTOR_BYTES // state_bytes)))


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a benchmark: window, batch and state dtypes of one model's layer on one GPU.

    Subclasses set the model's heads and the kind of its gate.
    """

    H: ClassVar[int]
    HV: ClassVar[int]
    gate: ClassVar[Gate]

    tokens: int
    batch: int
    checkpoint_dtype: StateDtype
    record_dtype: StateDtype

    @property
    def state_bytes(self) -> int:
        """Of one sequence's checkpoint in one layer."""
        return self.HV * V * K * int(getattr(torch, self.checkpoint_dtype).itemsize)

    @property
    def layers(self) -> int:
        return layers_past_l2(self.batch * self.state_bytes)

    @property
    def layout(self) -> StateLayout:
        config = ReplayConfig(L, self.checkpoint_dtype, self.record_dtype)
        conv, bf16 = (self.layers, 2 * self.H * K + self.HV * V, 3 + self.tokens), torch.bfloat16
        heads = (self.H, self.HV, K, V)
        return StateLayout(self.layers, *heads, conv, bf16, bf16, self.tokens - 1, config, self.gate)

    @property
    def dims(self) -> Dims:
        return Dims(self.batch, self.tokens, self.H, self.HV, K, V, self.layout.ring_rows)

    @property
    def gates(self) -> int:
        """Gate logits of one head and token."""
        return K if self.gate == 'vector' else 1

    def valid(self, device: str = 'cuda') -> torch.Tensor:
        """Committed records by row, [B], in random order.

        One token a step leaves them uniform in 1..L. For windows, every fifth row is about to flush.
        """
        rows = torch.arange(self.batch)
        if self.tokens == 1:
            valid = rows % L + 1
        else:
            valid = torch.where(rows % 5 == 0, L - rows % self.tokens, rows % (L - self.tokens + 1))
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(1))
        return valid[order].to(device)

    def advance(self, device: str = 'cuda') -> Advance:
        history = torch.full((self.batch,), HISTORY, device=device)
        positions = torch.stack([HISTORY - self.valid(device), history], -1).int()
        slots = torch.arange(1, self.batch + 1, device=device)
        lengths = torch.full_like(history, self.tokens)
        return advance_decode(slots, history, lengths, positions, L, self.layout.ring_rows)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """q, k, v as views of one projection, and the logits a, b."""
        widths = [self.H * K, self.H * K, self.HV * V]
        q, k, v = torch.randn(self.batch, self.tokens, sum(widths), device='cuda').bfloat16().split(widths, -1)
        a, b = (torch.randn(self.batch, self.tokens, self.HV, n, device='cuda').bfloat16() for n in (self.gates, 1))
        heads = (self.H, K)
        a = a if self.gate == 'vector' else a[..., 0]
        return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, (self.HV, V)), a, b[..., 0]

    def states(self) -> list[LayerState]:
        """A pool of every layer's states and records, filled with plausible values."""
        states = packed_layers(self.layout, self.batch + 2, 'cuda')
        for state in states:
            state.checkpoint.normal_(std=0.1)
            state.key.normal_()
            state.key_norm.fill_(K**-0.5)
            state.delta.normal_(std=0.3)
            if self.gate == 'vector':
                state.gate.normal_()
            else:
                state.gate.uniform_(-0.2, 0)
        return states

    def traffic_bytes(self, device: str = 'cuda') -> float:
        """Bytes a launch must move: states and live records, flushed states and new records, activations."""
        row = self.layout.record_bytes / self.layers
        activations = 2 * self.tokens * (2 * self.H * K + 2 * self.HV * V + self.HV * (self.gates + 1))
        flushes = float(self.advance(device).table[:, FLUSH].sum())
        records = float(self.valid(device).sum())
        return (
            self.batch * (self.state_bytes + self.tokens * row + activations)
            + records * row
            + flushes * self.state_bytes
        )
