"""GDN decode kernels side by side: ours, LMDeploy's, and other projects' where they are installed.

See `kernel_bench` for what a contender is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from replayssm.gdn import decode, fused_decode, triton_decode
from replayssm.gdn.operands import kernel_arguments
from replayssm.layout import Gate, LayerState
from tests.bench.kernel_case import Case, K, L, Unavailable, V
from tests.replay.kernels import AMPERE

H, HV = 16, 32


@dataclass(frozen=True, slots=True)
class GdnCase(Case):
    """Qwen3.5-35B-A3B's linear-attention layers on one GPU."""

    H: ClassVar[int] = H
    HV: ClassVar[int] = HV
    gate: ClassVar[Gate] = 'scalar'


class Ours:
    """The kernel that the launcher selects."""

    def __init__(self, case: GdnCase) -> None:
        self.states, self.table, self.inputs = case.states(), case.advance().table, case.inputs()
        self.dims = case.dims
        self.gate_parameters = -torch.full((HV,), 0.1, device='cuda'), torch.zeros(HV, device='cuda')
        self.out = torch.empty_like(self.inputs[2])

    def __call__(self) -> None:
        for state in self.states:
            operands = (*self.inputs, *self.gate_parameters, state, self.table)
            self.step(state, operands)

    def step(self, _: LayerState, operands: tuple[Any, ...]) -> None:
        decode.replay_decode(*operands)


class CpAsync(Ours):
    """The fused kernel without TMA, as other GPUs than Hopper's run it."""

    def step(self, state: LayerState, operands: tuple[Any, ...]) -> None:
        fused_decode.launch(kernel_arguments(*operands, K**-0.5, self.out), self.dims, state, AMPERE)


class Portable(Ours):
    """The plain-Triton kernel, which GPUs run that the fused one does not know."""

    def step(self, _: LayerState, operands: tuple[Any, ...]) -> None:
        triton_decode.launch(kernel_arguments(*operands, K**-0.5, self.out), self.dims)


class Stock:
    """LMDeploy's recurrent kernel on its packed pool; a window keeps a state a token."""

    def __init__(self, case: GdnCase) -> None:
        try:
            from lmdeploy.pytorch.kernels.cuda.gated_delta_rule import fused_recurrent_gated_delta_rule
        except ImportError as error:
            raise Unavailable(f'lmdeploy: {error}') from error
        self.kernel = fused_recurrent_gated_delta_rule
        snapshots = (case.tokens,) if case.tokens > 1 else ()
        shape, dtype = (*snapshots, HV, V, K), getattr(torch, case.checkpoint_dtype)
        layers = min(case.layers, int(100e9 // (case.batch * case.tokens * HV * V * K * dtype.itemsize)))
        pool = torch.empty(case.batch + 2, layers, *shape, dtype=dtype, device='cuda').normal_(std=0.1)
        self.states = pool.unbind(1)
        self.q, self.k, self.v, a, b = case.inputs()
        self.g, self.beta = -a.float().sigmoid() * 0.2, b.float().sigmoid()
        self.slots = torch.arange(1, case.batch + 1, device='cuda')
        lengths = torch.full((case.batch,), 1000, dtype=torch.int32, device='cuda')
        self.lengths = lengths if case.tokens > 1 else None

    def __call__(self) -> None:
        for state in self.states:
            self.kernel(
                self.q,
                self.k,
                self.v,
                g=self.g,
                beta=self.beta,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                state_indices=self.slots,
                cache_seqlens=self.lengths,
                transpose_state_layout=True,
            )


class SGLang:
    """SGLang's replay kernels: decode for one token, circular verify for a window; bf16 rings of L rows."""

    def __init__(self, case: GdnCase) -> None:
        try:
            from sglang.kernels.ops.attention.linear import fused_recurrent_linear_replayssm, gdn_replayssm_spec_decode
        except ImportError as error:
            raise Unavailable(f'sglang: {error}') from error
        self.case = case
        self.decode = fused_recurrent_linear_replayssm.fused_recurrent_linear_replayssm_decode
        self.verify = gdn_replayssm_spec_decode.gdn_replayssm_spec_decode
        slots, dtype = case.batch + 2, getattr(torch, case.checkpoint_dtype)

        def ring(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(slots, *shape, dtype=dtype, device='cuda').normal_(std=0.1)

        self.states = [ring(HV, V, K, dtype=dtype) for _ in range(case.layers)]
        self.rings = [(ring(HV, L, V), ring(H, L, K), ring(HV, L, dtype=torch.float32)) for _ in range(case.layers)]
        self.raw = [(ring(HV, L, V), ring(H, L, K), ring(HV, L, dtype=torch.float32)) for _ in range(case.layers)]
        q, k, v, self.a, self.b = (tensor.flatten(0, 1) for tensor in case.inputs())
        self.qkv = torch.cat([x.flatten(1) for x in (q, k, v)], -1)
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.a_log, self.dt_bias = torch.full((HV,), -2.0, device='cuda'), torch.zeros(HV, device='cuda')
        self.slots = torch.arange(1, case.batch + 1, device='cuda', dtype=torch.int32)
        self.valid = (case.valid() - (1 if case.tokens == 1 else 0)).int()
        self.by_slot = torch.zeros(slots, dtype=torch.int32, device='cuda')
        self.by_slot[1:-1] = self.valid
        self.flush = (self.by_slot + case.tokens > L).to(torch.int8)
        self.base = torch.zeros_like(self.by_slot)
        self.starts = torch.arange(case.batch + 1, device='cuda', dtype=torch.int32) * case.tokens
        self.out = torch.empty(case.batch, 1, HV, V, dtype=torch.bfloat16, device='cuda')
        self.window_out = torch.empty_like(self.v)

    def __call__(self) -> None:
        for state, ring, raw in zip(self.states, self.rings, self.raw, strict=True):
            if self.case.tokens == 1:
                head = (self.qkv, self.a, self.b, self.a_log, self.dt_bias, K**-0.5, state, *ring, self.out)
                self.decode(*head, self.slots, self.valid, use_qk_l2norm_in_kernel=True)
            else:
                head = (self.q, self.k, self.v, self.a, self.b, self.a_log, self.dt_bias, state, *ring, *raw)
                cursors = (self.starts, self.slots, self.slots, self.by_slot, self.base, self.flush)
                self.verify(*head, self.window_out, *cursors, L, self.case.tokens)


class Fla:
    """flash-linear-attention's recurrent kernel: reads a state and writes another one."""

    def __init__(self, case: GdnCase) -> None:
        if case.tokens > 1:
            raise Unavailable('fla: no states to roll a window back to')
        try:
            from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        except ImportError as error:
            raise Unavailable(f'fla: {error}') from error
        self.kernel = fused_recurrent_gated_delta_rule
        dtype = getattr(torch, case.checkpoint_dtype)
        shape = (case.batch, HV, K, V)
        self.states = [torch.empty(shape, dtype=dtype, device='cuda').normal_(std=0.1) for _ in range(case.layers)]
        self.q, self.k, self.v, a, b = case.inputs()
        self.g, self.beta = -a.float().sigmoid() * 0.2, b.float().sigmoid()

    def __call__(self) -> None:
        for state in self.states:
            options = {'initial_state': state, 'output_final_state': True, 'use_qk_l2norm_in_kernel': True}
            self.kernel(self.q, self.k, self.v, g=self.g, beta=self.beta, **options)


class FlashInfer:
    """FlashInfer has GDN kernels for Blackwell and, in some releases, for Hopper's prefill."""

    def __init__(self, case: GdnCase) -> None:
        try:
            import flashinfer  # noqa: F401
        except ImportError as error:
            raise Unavailable(f'flashinfer: {error}') from error
        raise Unavailable('flashinfer: no entry point for this pool layout is known to this benchmark')


CONTENDERS = {
    'ours': Ours,
    'cp.async': CpAsync,
    'portable': Portable,
    'stock': Stock,
    'sglang': SGLang,
    'fla': Fla,
    'flashinfer': FlashInfer,
}
