"""LMDeploy's gated-delta operator on checkpoints and records instead of whole states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaRuleImpl

from replayssm.gdn import reference
from replayssm.gdn.operands import token_rows
from replayssm.patching import Patches


class _Ops(NamedTuple):
    """The two operators of `gdn.reference`, on one kind of device."""

    replay_decode: Callable[..., torch.Tensor]
    materialise: Callable[..., torch.Tensor]


@functools.cache
def _ops(device: torch.device) -> _Ops:
    if device.type == 'cpu':
        return _Ops(reference.replay_decode, reference.materialise)
    from replayssm.gdn import decode, triton_materialise

    return _Ops(decode.replay_decode, triton_materialise.materialise)


class Operands(NamedTuple):
    """Arguments of the operator, by LMDeploy's names; dimensions as in `gdn.reference` with all tokens in one row."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    dt_bias: torch.Tensor
    a_log_exp: torch.Tensor
    """-exp(A_log), whatever its name says."""
    recurrent_state: torch.Tensor
    gated_delta_meta: Any
    kv_ratio: int
    use_qk_l2norm_in_kernel: bool


def install(patches: Patches) -> None:
    """Patch the operator of every backend; metadata without a `ReplayStep` keeps stock behaviour."""

    @patches.wrap(GatedDeltaRuleImpl, 'prefill')
    def prefill(stock: Any, self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        operands = Operands(*args, **kwargs)
        if operands.gated_delta_meta.replay is None:
            return stock(self, *args, **kwargs)
        return _prefill(self, operands)

    @patches.wrap(GatedDeltaRuleImpl, 'decode')
    def decode(stock: Any, self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        operands = Operands(*args, **kwargs)
        if operands.gated_delta_meta.replay is None:
            return stock(self, *args, **kwargs)
        return _decode(operands)


def _prefill(impl: Any, x: Operands) -> torch.Tensor:
    """Run LMDeploy's chunked operator from the checkpoints with their records folded in, and keep its final states."""
    meta = x.gated_delta_meta
    state = meta.replay.layer_state(x.recurrent_state)
    states = _ops(x.query.device).materialise(state, meta.replay.cursors)
    # A fresh sequence starts from zeros, so the operator's reset gate is not needed; at -1e6 it would cost the first
    # chunk's float32 gate sums their fraction.
    normalise = x.use_qk_l2norm_in_kernel
    q, k, g, beta, normalised = impl.prepare_inputs(
        x.query, x.key, x.b, x.a, x.dt_bias, x.a_log_exp, x.kv_ratio, use_qk_l2norm_in_kernel=normalise
    )
    # Not `impl.chunk_gated_delta_rule`, which would copy the states out of a pool and back.
    out, states = impl.chunk_func(
        q,
        k,
        x.value,
        g=g,
        beta=beta,
        initial_state=states,
        use_qk_l2norm_in_kernel=normalise and not normalised,
        cu_seqlens=meta.cu_seqlens,
        output_final_state=True,
        transpose_state_layout=True,
    )
    state.checkpoint.index_copy_(0, meta.state_ids, states.to(state.checkpoint.dtype))
    return out


def _decode(x: Operands) -> torch.Tensor:
    """Decode one token, or verify a window, of every sequence."""
    if not x.use_qk_l2norm_in_kernel:
        raise ValueError('use_qk_l2norm_in_kernel: expected True, got False; replay normalises keys by itself')
    step = x.gated_delta_meta.replay
    window = (step.cursors.size(0), -1)
    q, k, v, a, b = (token_rows(tensor[0]).unflatten(0, window) for tensor in (x.query, x.key, x.value, x.a, x.b))
    out = _ops(x.query.device).replay_decode(
        q, k, v, a.flatten(2), b.flatten(2), x.a_log_exp, x.dt_bias, step.layer_state(x.recurrent_state), step.cursors
    )
    return out.flatten(0, 1)[None]
