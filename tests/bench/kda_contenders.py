"""KDA decode kernels side by side: ours, and other projects' where they are installed; see `kernel_bench`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from replayssm.gdn.operands import kernel_arguments
from replayssm.kda import decode, fused_decode, triton_decode, triton_recurrent
from replayssm.layout import Gate, LayerState
from tests.bench.kernel_case import HISTORY, Case, K, L, Unavailable, V
from tests.replay.kernels import AMPERE

LOWER_BOUND = -5.0


@dataclass(frozen=True, slots=True)
class KdaCase(Case):
    """GLM-5.3-Flash's linear-attention layers on one of four GPUs."""

    H: ClassVar[int] = 16
    HV: ClassVar[int] = 16
    gate: ClassVar[Gate] = 'vector'


class Ours:
    """The kernel that the launcher selects."""

    def __init__(self, case: KdaCase) -> None:
        self.states, self.table, self.inputs = case.states(), case.advance().table, case.inputs()
        self.dims = case.dims
        self.gate_parameters = -torch.ones(case.HV, device='cuda'), torch.full((case.HV, K), -2.0, device='cuda')
        self.out = torch.empty_like(self.inputs[2])

    def __call__(self) -> None:
        for state in self.states:
            operands = (*self.inputs, *self.gate_parameters, state, self.table)
            self.step(state, operands)

    def step(self, _: LayerState, operands: tuple[Any, ...]) -> None:
        decode.replay_decode(*operands, lower_bound=LOWER_BOUND)


class CpAsync(Ours):
    """The fused kernel without TMA, as other GPUs than Hopper's run it."""

    def step(self, state: LayerState, operands: tuple[Any, ...]) -> None:
        arguments = kernel_arguments(*operands, K**-0.5, self.out)
        fused_decode.launch(arguments, self.dims, state, LOWER_BOUND, AMPERE)


class Portable(Ours):
    """The plain-Triton kernel, which GPUs run that the fused one does not know."""

    def step(self, _: LayerState, operands: tuple[Any, ...]) -> None:
        triton_decode.launch(kernel_arguments(*operands, K**-0.5, self.out), self.dims, LOWER_BOUND)


class Stock:
    """Decoding with whole states, without ReplaySSM; a window keeps a state a token."""

    def __init__(self, case: KdaCase) -> None:
        snapshots = (case.tokens,) if case.tokens > 1 else ()
        shape, dtype = (*snapshots, case.HV, V, K), getattr(torch, case.checkpoint_dtype)
        pool = torch.empty(case.batch + 2, case.layers, *shape, dtype=dtype, device='cuda').normal_(std=0.1)
        self.states = pool.unbind(1)
        self.gate_parameters = -torch.ones(case.HV, device='cuda'), torch.full((case.HV, K), -2.0, device='cuda')
        self.inputs = case.inputs()
        self.slots = torch.arange(1, case.batch + 1, device='cuda')
        self.history = torch.full((case.batch,), HISTORY, device='cuda') if snapshots else None

    def __call__(self) -> None:
        for state in self.states:
            operands = (*self.inputs, *self.gate_parameters, state, self.slots, self.history)
            triton_recurrent.recurrent_decode(*operands, lower_bound=LOWER_BOUND)


class SGLang:
    """SGLang's replay decode with a gate per channel and bf16 rings of L rows; it has no bounded gate and no window."""

    def __init__(self, case: KdaCase) -> None:
        if case.tokens > 1:
            raise Unavailable('sglang: no replay of windows with a gate per channel')
        try:
            from sglang.kernels.ops.attention.linear import fused_recurrent_linear_replayssm
        except ImportError as error:
            raise Unavailable(f'sglang: {error}') from error
        self.kernel = fused_recurrent_linear_replayssm.fused_recurrent_linear_replayssm_decode
        slots, dtype = case.batch + 2, getattr(torch, case.checkpoint_dtype)

        def ring(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(slots, *shape, dtype=dtype, device='cuda').normal_(std=0.1)

        self.states = [ring(case.HV, V, K, dtype=dtype) for _ in range(case.layers)]
        gates = {'dtype': torch.float32}
        self.rings = [
            (ring(case.HV, L, V), ring(case.H, L, K), ring(case.HV, L, K, **gates)) for _ in range(case.layers)
        ]
        q, k, v, a, b = (tensor.flatten(0, 1) for tensor in case.inputs())
        self.qkv = torch.cat([x.flatten(1) for x in (q, k, v)], -1)
        self.a, self.b = a, b
        self.a_log = torch.full((case.HV,), -2.0, device='cuda')
        self.dt_bias = torch.zeros(case.HV, K, device='cuda')
        self.slots = torch.arange(1, case.batch + 1, device='cuda', dtype=torch.int32)
        self.valid = (case.valid() - 1).int()
        self.out = torch.empty(case.batch, 1, case.HV, V, dtype=torch.bfloat16, device='cuda')

    def __call__(self) -> None:
        for state, ring in zip(self.states, self.rings, strict=True):
            head = (self.qkv, self.a, self.b, self.a_log, self.dt_bias, K**-0.5, state, *ring, self.out)
            self.kernel(*head, self.slots, self.valid, use_qk_l2norm_in_kernel=True, is_kda=True)


class Fla:
    """flash-linear-attention's recurrent kernel: reads a state and writes another one."""

    def __init__(self, case: KdaCase) -> None:
        if case.tokens > 1:
            raise Unavailable('fla: no states to roll a window back to')
        try:
            from fla.ops.kda import fused_recurrent_kda
        except ImportError as error:
            raise Unavailable(f'fla: {error}') from error
        self.kernel = fused_recurrent_kda
        shape, dtype = (case.batch, case.HV, K, V), getattr(torch, case.checkpoint_dtype)
        self.states = [torch.empty(shape, dtype=dtype, device='cuda').normal_(std=0.1) for _ in range(case.layers)]
        self.q, self.k, self.v, a, b = case.inputs()
        self.g, self.beta = LOWER_BOUND * a.float().sigmoid(), b.float().sigmoid()

    def __call__(self) -> None:
        for state in self.states:
            options = {'initial_state': state, 'output_final_state': True, 'use_qk_l2norm_in_kernel': True}
            self.kernel(self.q, self.k, self.v, g=self.g, beta=self.beta, **options)


CONTENDERS = {'ours': Ours, 'cp.async': CpAsync, 'portable': Portable, 'stock': Stock, 'sglang': SGLang, 'fla': Fla}
