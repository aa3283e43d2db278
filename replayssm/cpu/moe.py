"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.moe import FusedMoEImpl


class CpuFusedMoEImpl(FusedMoEImpl):
    """Runs every chosen expert once, over all the tokens that chose it."""

    def __init__(self, renormalize: bool) -> None:
        self.renormalize = renormalize

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        gate_up_weights: torch.Tensor,
        down_weights: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        expert_list: list[int] | None = None,
        act_func: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return `[tokens, hidden]`.

        Args:
            hidden_states: `[tokens, hidden]`.
            topk_weights: `[tokens, top_k]` float, rescaled to a sum of one when built with `renormalize`.
            topk_ids: `[tokens, top_k]` integer.
            gate_up_weights: `[experts, 2 * intermediate, hidden]`.
            down_weights: `[experts, hidden, intermediate]`.
            act_func: maps `[n, 2 * intermediate]` to `[n, intermediate]`; `None` is SwiGLU.
        """
        if self.renormalize:
            topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        out = hidden_states.new_zeros(hidden_states.size(0), down_weights.size(1), dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            token, rank = (topk_ids == expert).nonzero(as_tuple=True)
            bias = None if gate_up_bias is None else gate_up_bias[expert]
            gate_up = F.linear(hidden_states[token], gate_up_weights[expert], bias)
            hidden = _swiglu(gate_up) if act_func is None else act_func(gate_up)
            bias = None if down_bias is None else down_bias[expert]
            expert_out = F.linear(hidden, down_weights[expert], bias)
            out.index_add_(0, token, expert_out.float() * topk_weights[token, rank, None].float())
        return out.to(hidden_states.dtype)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
