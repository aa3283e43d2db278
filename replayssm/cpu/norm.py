"""RMSNorm, plain and gated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.norm import RMSNormImpl
from torch import nn

_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {'silu': F.silu, 'swish': F.silu, 'sigmoid': torch.sigmoid}


class CpuRMSNormImpl(RMSNormImpl):
    """RMSNorm over the last dimension with an optional residual, accumulated in float32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        self.shape = (hidden_size,)
        self.eps = eps

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise `x + residual`, `[..., hidden_size]`; with a residual return the sum as well."""
        if residual is None:
            return rms_norm(x, self.shape, weight, self.eps)
        residual = x + residual
        return rms_norm(residual, self.shape, weight, self.eps), residual


class CpuRMSNormGated(nn.Module):
    """`RMSNorm(x) * activation(gate)`, in place of the Triton module that LMDeploy takes from fla."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        activation: str = 'swish',
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if activation not in _GATES:
            raise ValueError(f'activation: expected one of {sorted(_GATES)}, got {activation!r}')
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.shape = (hidden_size,)
        self.eps = eps
        self.gate = _GATES[activation]

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return `[tokens, hidden_size]` in the dtype of `x`."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.shape, self.weight, self.eps) * self.gate(gate)
        y = F.rms_norm(x.float(), self.shape, self.weight.float(), self.eps)
        return (y * self.gate(gate.float())).to(x.dtype)


def rms_norm(x: torch.Tensor, shape: tuple[int, ...], weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise in float32, multiply by the weight there and round once, as LMDeploy's kernels do."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, shape, weight, eps)
    return F.rms_norm(x.float(), shape, weight.float(), eps).to(x.dtype)
