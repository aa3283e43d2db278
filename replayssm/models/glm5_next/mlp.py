"""Feed-forward layers: dense, and a mixture of experts."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from lmdeploy.pytorch import distributed
from lmdeploy.pytorch.distributed import get_tp_world_rank
from lmdeploy.pytorch.models.patch import add_prefix
from lmdeploy.pytorch.nn.linear import build_down_linear, build_gateup_linear
from lmdeploy.pytorch.nn.moe import build_fused_moe
from lmdeploy.pytorch.nn.moe.route import NoauxTCRouter
from torch import nn


def clamped_swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): [..., 2 n] -> [..., n]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Mlp(nn.Module):
    """A dense feed-forward layer; without `all_reduce` every rank returns its part of the sum."""

    def __init__(
        self, config: Any, width: int, dtype: torch.dtype, device: torch.device, prefix: str, all_reduce: bool = True
    ) -> None:
        super().__init__()
        quant = getattr(config, 'quantization_config', None)
        options: dict[str, Any] = {'bias': False, 'dtype': dtype, 'device': device, 'quant_config': quant}
        self.gate_up_proj = build_gateup_linear(
            config.hidden_size, [width, width], is_tp=True, prefix=add_prefix('gate_up_proj', prefix), **options
        )
        self.down_proj = build_down_linear(
            width,
            config.hidden_size,
            is_tp=True,
            all_reduce=all_reduce,
            prefix=add_prefix('down_proj', prefix),
            **options,
        )
        self.limit = config.swiglu_limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(clamped_swiglu(self.gate_up_proj(x), self.limit))


class Router(nn.Module):
    """Sigmoid scores in float32; a bias takes part in the choice, but not in the weights."""

    def __init__(self, config: Any, device: torch.device) -> None:
        super().__init__()
        experts = config.n_routed_experts
        options: dict[str, Any] = {'dtype': torch.float32, 'device': device}
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size, **options), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(torch.empty(experts, **options), requires_grad=False)
        self.choose = NoauxTCRouter(
            'sigmoid',
            top_k=config.num_experts_per_tok,
            n_group=config.n_group,
            topk_group=config.topk_group,
            n_routed_experts=experts,
            routed_scaling_factor=config.routed_scaling_factor,
            renormalize=config.norm_topk_prob,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts [T, top_k] of tokens [T, hidden]."""
        weights, experts = self.choose(F.linear(x.float(), self.weight), self.e_score_correction_bias)
        return weights, experts


class MixtureOfExperts(nn.Module):
    """Routed experts and a shared one, summed over the ranks once."""

    def __init__(self, config: Any, layer_idx: int, dtype: torch.dtype, device: torch.device, prefix: str) -> None:
        super().__init__()
        self.gate = Router(config, device)
        self.experts = build_fused_moe(
            config.hidden_size,
            config.moe_intermediate_size,
            config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            renormalize=False,
            dtype=dtype,
            device=device,
            all_reduce=False,
            quant_config=getattr(config, 'quantization_config', None),
            layer_idx=layer_idx,
            act_func=functools.partial(clamped_swiglu, limit=config.swiglu_limit),
            prefix=add_prefix('experts', prefix),
        )
        width = config.moe_intermediate_size * config.n_shared_experts
        shared = add_prefix('shared_experts', prefix)
        self.shared_experts = Mlp(config, width, dtype, device, shared, all_reduce=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, experts = self.gate(tokens)
        out = self.experts(tokens, weights, experts) + self.shared_experts(tokens)
        if get_tp_world_rank()[0] > 1:
            distributed.all_reduce(out)
        return out.view_as(x)
