"""Attention of a window of drafts where FlashAttention-3 is not installed; stock LMDeploy refuses to start there.

LMDeploy's Triton kernel for paged decoding takes one token a sequence. A window of T tokens is T such sequences that
share a page table and see one more token each. The kernel reads the cached keys T times, mostly from L2, so FA3 is the
faster choice and is used where it is present.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from lmdeploy.pytorch.backends.cuda import attention
from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionImpl
from lmdeploy.utils import get_logger

from replayssm.patching import Patches

logger = get_logger('lmdeploy')


def install(patches: Patches) -> None:
    """Lift the requirement of FA3 and teach the Triton implementation windows; FA3's implementation is not touched."""

    @patches.wrap(attention, 'require_fa3_for_speculative_decoding')
    def require_fa3(require: Any) -> None:
        if not attention.use_fa3:
            logger.warning('FlashAttention-3 is not installed: drafts are verified by the slower Triton attention.')

    @patches.wrap(TritonAttentionImpl, '_get_max_q_seqlen')
    def get_max_q_seqlen(get: Any, self: Any, query: torch.Tensor, attn_metadata: Any) -> int:
        if attn_metadata.is_decoding and self.block_sparse_size == 1:
            return query.size(0) // attn_metadata.q_seqlens.size(0)
        length: int = get(self, query, attn_metadata)
        return length

    @patches.wrap(TritonAttentionImpl, '_forward_decoding')
    def forward_decoding(
        forward: Any,
        self: Any,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        attn_metadata: Any,
        max_q_seqlen: int,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        if max_q_seqlen > 1 and self.block_sparse_size == 1:
            attn_metadata = _as_single_tokens(attn_metadata, max_q_seqlen)
            max_q_seqlen = 1
        return forward(self, query, k_cache, v_cache, attn_metadata, max_q_seqlen, *rest, **options)


def window_seqlens(kv_seqlens: torch.Tensor, window: int) -> torch.Tensor:
    """Cached tokens that every token of a window sees, its own included: [B] -> [B * window]."""
    behind = torch.arange(window - 1, -1, -1, device=kv_seqlens.device, dtype=kv_seqlens.dtype)
    return (kv_seqlens[:, None] - behind).flatten()


def _as_single_tokens(attn_metadata: Any, window: int) -> Any:
    return dataclasses.replace(
        attn_metadata,
        kv_seqlens=window_seqlens(attn_metadata.kv_seqlens, window),
        block_offsets=attn_metadata.block_offsets.repeat_interleave(window, 0),
    )
