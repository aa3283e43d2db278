"""The operator backend of device type "cpu" and the seam where LMDeploy chooses it."""

from __future__ import annotations

import os
from typing import Any

import torch
from lmdeploy.pytorch.backends import selector
from lmdeploy.pytorch.backends.apply_rotary_emb import ApplyRotaryEmbBuildSpec
from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec
from lmdeploy.pytorch.backends.base import BuildSpec, ImplT, OpsBackend
from lmdeploy.pytorch.backends.causal_conv1d import CausalConv1dBuildSpec
from lmdeploy.pytorch.backends.default import DefaultOpsBackend
from lmdeploy.pytorch.backends.flash_attention import FlashAttentionBuildSpec
from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMetaBuildSpec, GatedDeltaRuleBuildSpec
from lmdeploy.pytorch.backends.moe import FusedMoEBuildSpec
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingBuildSpec
from lmdeploy.pytorch.backends.norm import RMSNormBuildSpec
from lmdeploy.pytorch.devices import get_device_manager
from lmdeploy.pytorch.models import qwen3_5, qwen3_next
from lmdeploy.pytorch.nn import gated_delta as gated_delta_module

from replayssm.cpu.attention import (
    CpuAttentionMetadata,
    CpuFlashAttentionImpl,
    CpuPagedAttentionImpl,
    build_metadata,
)
from replayssm.cpu.conv import CpuCausalConv1dImpl
from replayssm.cpu.gated_delta import CpuGatedDeltaMetaImpl, CpuGatedDeltaRuleImpl
from replayssm.cpu.moe import CpuFusedMoEImpl
from replayssm.cpu.norm import CpuRMSNormGated, CpuRMSNormImpl
from replayssm.cpu.rotary import CpuApplyRotaryEmbImpl
from replayssm.cpu.sampling import CpuMultinomialSamplingImpl
from replayssm.patching import Patches


class CpuOpsBackend(DefaultOpsBackend):
    """Torch operators; what is not overridden here is LMDeploy's portable default."""

    @staticmethod
    def get_name() -> str:
        return 'cpu'

    @classmethod
    def build_op(cls, spec: BuildSpec[ImplT], *, enable_deterministic: bool = False) -> ImplT:
        """Build the operator that `spec` asks for."""
        op = _build(spec)
        return super().build_op(spec, enable_deterministic=enable_deterministic) if op is None else op

    @staticmethod
    def get_attention_metadata_cls() -> type[CpuAttentionMetadata]:
        return CpuAttentionMetadata

    @classmethod
    def update_step_context(cls, step_context: Any) -> Any:
        """Attach the attention metadata of one step; `step_context` is mutated in place."""
        step_context.attn_metadata = build_metadata(step_context)
        return step_context

    @staticmethod
    def ccl_backend() -> str:
        return 'gloo'

    @staticmethod
    def device_count() -> int:
        return len(os.sched_getaffinity(0))

    @staticmethod
    def support_ray() -> bool:
        return True


def _build(spec: Any) -> Any:
    match spec:
        case PagedAttentionBuildSpec():
            return CpuPagedAttentionImpl(spec)
        case FlashAttentionBuildSpec():
            return CpuFlashAttentionImpl(spec)
        case ApplyRotaryEmbBuildSpec():
            return CpuApplyRotaryEmbImpl()
        case RMSNormBuildSpec():
            return CpuRMSNormImpl(spec.hidden_size, spec.eps)
        case CausalConv1dBuildSpec():
            return CpuCausalConv1dImpl()
        case GatedDeltaMetaBuildSpec():
            return CpuGatedDeltaMetaImpl()
        case GatedDeltaRuleBuildSpec():
            return CpuGatedDeltaRuleImpl()
        case MultinomialSamplingBuildSpec():
            return CpuMultinomialSamplingImpl()
        case FusedMoEBuildSpec():
            if spec.ep_size > 1:
                raise NotImplementedError("device type 'cpu' has no expert parallelism")
            return CpuFusedMoEImpl(spec.renormalize)
    return None


def install(patches: Patches) -> None:
    """Make LMDeploy choose this backend for device type "cpu" until `patches` is undone."""
    stock_get_backend = selector._get_backend

    def get_backend() -> type[OpsBackend]:
        if get_device_manager().current_context().device_type == 'cpu':
            return CpuOpsBackend
        return stock_get_backend()

    patches.set(selector, '_get_backend', get_backend)
    # The one operator that models take from fla without asking the backend; they bind it by name.
    for module in (gated_delta_module, qwen3_5, qwen3_next):
        patches.set(module, 'build_rmsnorm_gated', _build_rmsnorm_gated)


def _build_rmsnorm_gated(hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> torch.nn.Module:
    return CpuRMSNormGated(hidden_size, eps=eps, **kwargs)
