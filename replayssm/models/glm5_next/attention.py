"""Sparse multi-head latent attention without positional encoding."""

from __future__ import annotations

from typing import Any

import torch
from lmdeploy.pytorch.distributed import get_tp_world_rank
from lmdeploy.pytorch.models.patch import add_prefix
from lmdeploy.pytorch.nn import RMSNorm
from lmdeploy.pytorch.weight_loader.model_weight_loader import default_weight_loader
from torch import nn

from replayssm.models.glm5_next.indexer import Indexer, SharedSelection
from replayssm.models.glm5_next.linear import Projections
from replayssm.models.glm5_next.paging import Group, Paging
from replayssm.models.glm5_next.pieces import float_matmul, pieces
from replayssm.models.glm5_next.triton_attention import attend_fused

DENSE_TOKENS = 16384
"""Cached tokens up to which a prompt reads all of them under a mask; behind that every query gathers its own."""


class SparseLatentAttention(nn.Module):
    """Heads share one cached latent vector per token; their keys and values are projections of it.

    The projections are moved over to the queries and outputs, so that what is cached is what is attended to.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device, prefix: str) -> None:
        super().__init__()
        self.heads, self.rank = config.num_attention_heads, config.kv_lora_rank
        self.key_dim, self.value_dim = config.qk_nope_head_dim, config.v_head_dim
        self.scale = self.key_dim**-0.5
        build = Projections(config, dtype, device, prefix)
        hidden, q_rank = config.hidden_size, config.q_lora_rank
        self.q_a_proj = build.column('q_a_proj', hidden, q_rank, False)
        self.q_a_layernorm = RMSNorm(q_rank, config.rms_norm_eps, dtype=dtype, device=device)
        self.q_b_proj = build.column('q_b_proj', q_rank, self.heads * self.key_dim, True)
        self.kv_a_proj_with_mqa = build.column('kv_a_proj_with_mqa', hidden, self.rank, False)
        self.kv_a_layernorm = RMSNorm(self.rank, config.rms_norm_eps, dtype=dtype, device=device)
        self.kv_b_proj = HeadProjection(self.heads, self.key_dim + self.value_dim, self.rank, dtype, device)
        self.indexer = Indexer(config, dtype, device, add_prefix('indexer', prefix))
        self.o_proj = build.output('o_proj', self.heads * self.value_dim, hidden)

    def forward(
        self,
        x: torch.Tensor,
        latents: torch.Tensor,
        pools: torch.Tensor,
        tail: torch.Tensor,
        paging: Paging,
        shared: SharedSelection | None = None,
        is_reused: bool = False,
    ) -> torch.Tensor:
        """[1, T, hidden] of the same.

        Args:
            latents: cache [blocks, block_size, 1, rank], mutated in place.
            pools: cache [blocks, block_size, 1, index_dim / pool], which is [blocks, block_size / pool, index_dim] by
                another name; mutated in place.
            tail: the layer's ring of the indexer's newest tokens, mutated in place.
            shared: takes what is chosen, or with `is_reused` says it; the draft layer's.
        """
        latents, pools = latents.squeeze(2), pools.view(pools.size(0), -1, self.indexer.dim)
        q_latent = self.q_a_layernorm(self.q_a_proj(x))[0]
        to_key, to_value = self.kv_b_proj.weight.split([self.key_dim, self.value_dim], 1)
        query = self.q_b_proj(q_latent).unflatten(-1, (-1, self.key_dim))
        query = torch.einsum('thd,hdc->thc', query, to_key)
        latent, source = self.kv_a_layernorm(self.kv_a_proj_with_mqa(x))[0].to(latents.dtype), paging.source
        latents[paging.block[source], paging.offset[source]] = latent[source]
        self.indexer.write(x[0], pools, tail, paging)
        outs = []
        for group in paging.groups:
            shape = group.position.shape
            queries, q_rows, x_rows = (y[group.tokens].unflatten(0, shape) for y in (query, q_latent, x[0]))
            if shared is not None and is_reused:
                selected = shared.reuse(shape[0])
            else:
                selected = self.indexer.select(q_rows, x_rows, pools, group)
                if shared is not None:
                    shared.record(group.tokens, selected)
            if group.is_prompt:
                is_dense = group.blocks.size(1) * latents.size(1) <= DENSE_TOKENS
                attend = attend_dense if is_dense else attend_gathered
            else:
                attend = attend_fused if x.is_cuda else attend_gathered
            outs.append(attend(queries, selected, latents, group, self.scale).flatten(0, 1))
        out = torch.einsum('thc,hdc->thd', torch.cat(outs), to_value)
        return self.o_proj(out.flatten(1)[None])


def attend_dense(
    query: torch.Tensor, selected: torch.Tensor, latents: torch.Tensor, group: Group, scale: float
) -> torch.Tensor:
    """`attend_gathered` with a mask over all cached tokens, which the queries of a sequence read once."""
    cached = latents[group.blocks].flatten(1, 2)
    count, heads = cached.size(1), query.size(2)
    # What a recycled page still holds must not even be multiplied by zero.
    is_behind = torch.arange(count, device=query.device) >= group.length[:, None]
    cached = cached.masked_fill(is_behind[..., None], 0).to(query.dtype)
    outs = []
    for rows in pieces(query.size(1), query.size(0) * count * (heads * 10 + 1)):
        # One column more takes what is not selected.
        tokens = torch.where(selected[:, rows] < 0, count, selected[:, rows].long())
        mask = torch.zeros(*tokens.shape[:2], count + 1, dtype=torch.bool, device=query.device)
        mask = mask.scatter_(-1, tokens, True)[..., :count]
        outs.append(_weigh(query[:, rows], cached, mask, scale))
    return torch.cat(outs, 1)


def attend_gathered(
    query: torch.Tensor, selected: torch.Tensor, latents: torch.Tensor, group: Group, scale: float
) -> torch.Tensor:
    """[n, Q, heads, rank] of the same: what the queries of a group find at `selected`.

    Args:
        selected: [n, Q, M] positions, negative for none.
        latents: [blocks, block_size, rank].
        scale: of the scores.
    """
    (block_size, rank), count, heads = latents.shape[1:], selected.size(-1), query.size(2)
    queries, tokens, position = query.flatten(0, 1), selected.flatten(0, 1), group.position.flatten()
    sequence = torch.arange(queries.size(0), device=query.device) // query.size(1)
    outs = []
    for rows in pieces(queries.size(0), count * (rank * latents.element_size() + heads * 10 + 32)):
        chosen = tokens[rows].long()
        is_chosen = chosen >= 0
        # A recycled page may hold NaN, the query's own token does not.
        chosen = torch.where(is_chosen, chosen, position[rows, None])
        # Rows of padding may name tokens behind the table.
        page = (chosen // block_size).clamp_max(group.blocks.size(1) - 1)
        cached = latents[group.blocks[sequence[rows, None], page], chosen % block_size].to(query.dtype)
        outs.append(_weigh(queries[rows, None], cached, is_chosen[:, None], scale)[:, 0])
    return torch.cat(outs).unflatten(0, query.shape[:2])


def _weigh(query: torch.Tensor, cached: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """[B, Q, heads, rank] of the same: softmax attention to those of `cached` [B, M, rank] in `mask` [B, Q, M]."""
    scores = float_matmul(query.flatten(1, 2), cached.mT).mul_(scale).unflatten(1, (query.size(1), -1))
    weights = scores.masked_fill_(~mask[:, :, None], float('-inf')).softmax(-1).to(query.dtype)
    return (weights.flatten(1, 2) @ cached).unflatten(1, (query.size(1), -1))


class HeadProjection(nn.Module):
    """A projection by heads, [H, out, in]; every rank loads its heads."""

    def __init__(self, heads: int, out: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        world_size, index = get_tp_world_rank()

        def load(param: nn.Parameter, loaded: torch.Tensor) -> None:
            default_weight_loader(param, loaded.unflatten(0, (heads, out)).chunk(world_size)[index])

        weight = torch.empty(heads // world_size, out, rank, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight.weight_loader = load  # type: ignore[attr-defined]
