"""A random life of a decoding batch under vector gates; `tests.gdn.decode_trial` has the life."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.kda.reference import gates
from replayssm.layout import StateLayout
from tests.gdn.decode_trial import Shape as ScalarShape
from tests.gdn.decode_trial import Trial as ScalarTrial


@dataclass(frozen=True)
class Shape(ScalarShape):
    """With the gates' lower bound; None is the softplus form."""

    bound: float | None = -5.0

    def __str__(self) -> str:
        return f'{super().__str__()}-{"softplus" if self.bound is None else "bounded"}'

    def layout(
        self, activation: torch.dtype = torch.float32, checkpoint: str = 'float32', record: str = 'float32'
    ) -> StateLayout:
        return super().layout(activation, checkpoint, record, gate='vector')


@dataclass
class Trial(ScalarTrial):
    """`a` is [B, T, HV, K], `dt_bias` [HV, K]."""

    shape: Shape

    def __post_init__(self) -> None:
        super().__post_init__()
        # Of a few channels the gate is strong, most forget slowly, as in a trained model.
        self.dt_bias = self.normal(self.shape.HV, self.shape.K) - 2

    @property
    def options(self) -> tuple[float | None, ...]:
        return (self.shape.K**-0.5, self.shape.bound)

    def gates(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
        return gates(a, b, self.neg_exp_a.to(dtype), self.dt_bias, self.shape.bound)

    def gate_logits(self) -> torch.Tensor:
        s = self.shape
        return self.normal(self.batch, s.T, s.HV, s.K)
