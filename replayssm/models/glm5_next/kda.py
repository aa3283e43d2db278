"""A Kimi Delta Attention layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lmdeploy.pytorch.distributed import get_tp_world_rank
from lmdeploy.pytorch.nn import gated_delta
from lmdeploy.pytorch.weight_loader.model_weight_loader import default_weight_loader
from torch import nn

from replayssm.gdn.operands import token_rows
from replayssm.kda import reference
from replayssm.kda.prefill import prefill
from replayssm.models.glm5_next.linear import Projections


class _Ops(NamedTuple):
    """The operators of `kda.reference`, on one kind of device."""

    replay_decode: Callable[..., torch.Tensor]
    recurrent_decode: Callable[..., torch.Tensor]
    materialise: Callable[..., torch.Tensor]


@functools.cache
def _ops(device: torch.device) -> _Ops:
    if device.type == 'cpu':
        return _Ops(reference.replay_decode, reference.recurrent_decode, reference.materialise)
    from replayssm.kda import decode, triton_materialise, triton_recurrent

    return _Ops(decode.replay_decode, triton_recurrent.recurrent_decode, triton_materialise.materialise)


class KdaAttention(nn.Module):
    """Projections, three causal convolutions, the delta rule with a gate per channel, and a gated norm."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device, prefix: str) -> None:
        super().__init__()
        self.head_dim, self.num_heads = config.linear_head_dim, config.linear_num_heads
        self.lower_bound: float | None = config.linear_lower_bound
        width = self.head_dim * self.num_heads
        build = Projections(config, dtype, device, prefix)
        hidden = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj = (build.column(f'{x}_proj', hidden, width, True) for x in 'qkv')
        self.b_proj = build.column('b_proj', hidden, self.num_heads, True)
        self.f_a_proj = build.column('f_a_proj', hidden, self.head_dim, False)
        self.f_b_proj = build.column('f_b_proj', self.head_dim, width, True)
        self.g_a_proj = build.column('g_a_proj', hidden, self.head_dim, False)
        self.g_b_proj = build.column('g_b_proj', self.head_dim, width, True)
        self.conv1d = gated_delta.CausalConv1d(
            3 * width,
            3 * width,
            config.linear_conv_kernel_dim,
            split=[width] * 3,
            groups=3 * width,
            bias=False,
            dtype=dtype,
            device=device,
        )
        self.A_log = _sharded(self.num_heads, device)
        self.dt_bias = _sharded(width, device)
        # By the module's name, because the cpu device replaces the builder there.
        self.o_norm = gated_delta.build_rmsnorm_gated(
            self.head_dim, eps=config.rms_norm_eps, activation='sigmoid', dtype=dtype, device=device
        )
        self.o_proj = build.output('o_proj', width, hidden)

    @functools.cached_property
    def gate_parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """-exp(A_log) [H] and dt_bias [H, K], float32."""
        return -self.A_log.float().exp(), self.dt_bias.float().unflatten(0, (-1, self.head_dim))

    def forward(
        self, x: torch.Tensor, conv_state: torch.Tensor, recurrent_state: torch.Tensor, meta: Any
    ) -> torch.Tensor:
        """[1, T, hidden] of the same; both states are one layer's views of the pool, mutated in place."""
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        qkv = self.conv1d(qkv, conv_state, gated_delta_meta=meta)
        q, k, v = token_rows(qkv[0]).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        a = self.f_b_proj(self.f_a_proj(x))[0].unflatten(-1, (-1, self.head_dim))
        b = self.b_proj(x)[0]
        out = (self._decode if meta.is_decoding else self._prefill)(q, k, v, a, b, recurrent_state, meta)
        gate = self.g_b_proj(self.g_a_proj(x)).view(-1, self.head_dim)
        out = self.o_norm(out.reshape(-1, self.head_dim), gate)
        return self.o_proj(out.view(1, x.size(1), -1))

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        recurrent_state: torch.Tensor,
        meta: Any,
    ) -> torch.Tensor:
        """Run the rule over whole chunks. A new sequence starts from zeros: no bounded gate forgets a slot."""
        g, beta = reference.gates(a, b, *self.gate_parameters, self.lower_bound)
        slots = meta.state_ids
        replay = getattr(meta, 'replay', None)
        if replay is not None:
            state = replay.layer_state(recurrent_state)
            states = _ops(q.device).materialise(state, replay.cursors, *self.gate_parameters, self.lower_bound)
            out, states = prefill(q, k, v, g, beta, states, meta.cu_seqlens)
            state.checkpoint.index_copy_(0, slots, states.to(state.checkpoint.dtype))
            return out
        read: tuple[torch.Tensor, ...] = (slots,)
        write = read
        if meta.spec_state_offsets is not None:
            read, write = ((slots, offsets.long()) for offsets in meta.spec_state_offsets)
        states = recurrent_state[read].float().masked_fill(meta.is_init[:, None, None, None], 0)
        out, states = prefill(q, k, v, g, beta, states, meta.cu_seqlens)
        recurrent_state[write] = states.to(recurrent_state.dtype)
        return out

    def _decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        recurrent_state: torch.Tensor,
        meta: Any,
    ) -> torch.Tensor:
        """Decode one token, or verify a window, of every sequence."""
        q, k, v, a, b = (x.unflatten(0, (meta.state_ids.size(0), -1)) for x in (q, k, v, a, b))
        operands = (q, k, v, a, b, *self.gate_parameters)
        ops, replay, bound = _ops(q.device), getattr(meta, 'replay', None), self.lower_bound
        if replay is not None:
            state = replay.layer_state(recurrent_state)
            out = ops.replay_decode(*operands, state, replay.cursors, lower_bound=bound)
        else:
            slots, history = meta.origin_state_ids, meta.cache_seqlens
            out = ops.recurrent_decode(*operands, recurrent_state, slots, history, lower_bound=bound)
        return out.flatten(0, 1)


def _sharded(size: int, device: torch.device) -> nn.Parameter:
    """A float32 parameter of which every rank loads its part."""
    world_size, rank = get_tp_world_rank()

    def load(param: nn.Parameter, loaded: torch.Tensor) -> None:
        default_weight_loader(param, loaded.flatten().chunk(world_size)[rank])

    parameter = nn.Parameter(torch.empty(size // world_size, dtype=torch.float32, device=device), requires_grad=False)
    parameter.weight_loader = load  # type: ignore[attr-defined]
    return parameter
