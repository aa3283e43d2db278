"""Paged and packed attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.attention import AttentionImpl, AttentionMetadata, PagedAttentionBuildSpec
from lmdeploy.pytorch.backends.flash_attention import FlashAttentionBuildSpec, FlashAttentionImpl


@dataclass
class CpuAttentionMetadata(AttentionMetadata):
    """Where this step's tokens go in the KV cache and what each sequence attends to.

    N is the number of sequences, T of new tokens, M the longest context.

    Attributes:
        write_block, write_offset: `[T]` int64, the cache row of every new token.
        read_block, read_offset: `[N, M]` int64, the cache row of every context position. Past the end of a sequence
            they repeat its last row, so that what a recycled block still holds is never read.
        mask: `[N, 1, T / N, M]` bool, true where a query sees a key, when every sequence has the same number of new
            tokens; `None` when that is not so and sequences are processed one by one.
        query_lens, context_lens: the lengths per sequence.
    """

    write_block: torch.Tensor | None = None
    write_offset: torch.Tensor | None = None
    read_block: torch.Tensor | None = None
    read_offset: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    query_lens: tuple[int, ...] = ()
    context_lens: tuple[int, ...] = ()


def build_metadata(context: Any) -> CpuAttentionMetadata:
    """Return the metadata of one step from LMDeploy's `StepContext`."""
    query_lens, context_lens = context.q_seqlens.long(), context.kv_seqlens.long()
    query_ends = query_lens.cumsum(0)
    metadata = CpuAttentionMetadata(
        is_decoding=context.is_decoding,
        block_offsets=context.block_offsets,
        q_start_loc=context.q_start_loc,
        q_seqlens=context.q_seqlens,
        kv_seqlens=context.kv_seqlens,
        cu_seqlens_q=F.pad(query_ends, (1, 0)).int(),
        cu_seqlens_k=F.pad(context_lens.cumsum(0), (1, 0)).int(),
        quant_policy=context.kv_quant_policy,
        query_lens=tuple(query_lens.tolist()),
        context_lens=tuple(context_lens.tolist()),
    )
    if context.kv_caches:
        _locate_rows(metadata, query_lens, context_lens, query_ends, context.kv_caches[0][0].size(1))
    return metadata


def _locate_rows(
    metadata: CpuAttentionMetadata,
    query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    query_ends: torch.Tensor,
    block_size: int,
) -> None:
    """Fill the cache rows and the mask of `metadata` in place."""
    blocks = metadata.block_offsets.long()
    num_tokens = sum(metadata.query_lens)
    sequence = torch.repeat_interleave(query_lens, output_size=num_tokens)
    position = torch.arange(num_tokens) + (context_lens - query_ends)[sequence]
    metadata.write_block = blocks[sequence, position // block_size]
    metadata.write_offset = position % block_size

    key_position = torch.arange(max(metadata.context_lens))
    readable = torch.minimum(key_position, context_lens[:, None] - 1).clamp_(min=0)
    metadata.read_block = blocks.gather(1, readable // block_size)
    metadata.read_offset = readable % block_size
    if len(set(metadata.query_lens)) == 1:
        metadata.mask = key_position <= position.view(len(metadata.query_lens), 1, -1, 1)


class CpuPagedAttentionImpl(AttentionImpl[CpuAttentionMetadata]):
    """Causal attention over the paged KV cache."""

    def __init__(self, spec: PagedAttentionBuildSpec) -> None:
        unsupported = {
            'alibi': spec.alibi,
            'sliding_window': spec.sliding_window not in (None, -1, (-1, -1)),
            'logit_softcapping': spec.logit_softcapping,
            'causal=False': not spec.causal,
            'use_flash_mla': spec.use_flash_mla,
            'learnable_sink': spec.learnable_sink,
            'block_sparse_size': spec.block_sparse_size != 1,
        }
        if names := [name for name, wanted in unsupported.items() if wanted]:
            raise NotImplementedError(f"device type 'cpu' has no attention with {', '.join(names)}")
        super().__init__(
            num_heads=spec.num_heads,
            head_size=spec.head_dim,
            scale=spec.scale,
            num_kv_heads=spec.num_kv_heads,
            v_head_size=spec.v_head_dim,
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        attn_metadata: CpuAttentionMetadata,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return `[T, num_heads, v_head_size]`.

        Args:
            query: `[T, num_heads, head_size]`.
            key: `[T, num_kv_heads, head_size]`; `None` reads the cache only.
            value: `[T, num_kv_heads, v_head_size]`.
            k_cache: `[blocks, block_size, num_kv_heads, head_size]`, mutated in place.
            v_cache: `[blocks, block_size, num_kv_heads, v_head_size]`, mutated in place.
        """
        meta = attn_metadata
        if key is not None and value is not None:
            k_cache[meta.write_block, meta.write_offset] = key
            v_cache[meta.write_block, meta.write_offset] = value
        keys = k_cache[meta.read_block, meta.read_offset].transpose(1, 2)
        values = v_cache[meta.read_block, meta.read_offset].transpose(1, 2)
        if meta.mask is not None:
            queries = query.unflatten(0, (len(meta.query_lens), -1)).transpose(1, 2)
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=meta.mask, scale=self.scale, enable_gqa=True
            )
            return out.transpose(1, 2).flatten(0, 1)
        outs = [
            _causal(q, k[:, :context_len], v[:, :context_len], self.scale)
            for q, k, v, context_len in zip(query.split(meta.query_lens), keys, values, meta.context_lens, strict=True)
        ]
        return torch.cat(outs)


class CpuFlashAttentionImpl(FlashAttentionImpl):
    """Attention over packed sequences without a cache, as vision towers use it."""

    def __init__(self, spec: FlashAttentionBuildSpec) -> None:
        if spec.logit_softcapping or spec.sliding_window not in (None, -1, (-1, -1)):
            raise NotImplementedError("device type 'cpu' has no attention with softcapping or a sliding window")
        self.scale = spec.scale
        self.causal = spec.causal

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        q_start_loc: torch.Tensor,
        q_seqlens: torch.Tensor,
        kv_start_loc: torch.Tensor,
        kv_seqlens: torch.Tensor,
        max_q_seqlen: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return `[T, num_heads, v_head_dim]` of packed `query`, `key` and `value`, `[T, heads, head_dim]`."""
        out = query.new_zeros(*query.shape[:-1], value.size(-1))
        for q_start, q_len, kv_start, kv_len in zip(
            q_start_loc.tolist(), q_seqlens.tolist(), kv_start_loc.tolist(), kv_seqlens.tolist(), strict=True
        ):
            k = key[kv_start : kv_start + kv_len].transpose(0, 1)
            v = value[kv_start : kv_start + kv_len].transpose(0, 1)
            q = query[q_start : q_start + q_len]
            out[q_start : q_start + q_len] = _causal(q, k, v, self.scale) if self.causal else _full(q, k, v, self.scale)
        return out


def _causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Return `[Q, H, V]` of `query` `[Q, H, D]`, the last Q positions of `keys` `[HKV, M, D]`."""
    query_len, context_len = query.size(0), keys.size(1)
    if query_len == context_len:
        return _full(query, keys, values, scale, is_causal=True)
    position = torch.arange(context_len - query_len, context_len)
    return _full(query, keys, values, scale, mask=torch.arange(context_len) <= position[:, None])


def _full(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, is_causal=is_causal, scale=scale,
        enable_gqa=True,
    )  # fmt: skip
    return out[0].transpose(0, 1)
