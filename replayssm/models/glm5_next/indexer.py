"""Which cached tokens a query attends to: pools of neighbouring tokens scored by one key each (k-pool indexer)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from replayssm.models.glm5_next import triton_indexer
from replayssm.models.glm5_next.linear import Projections
from replayssm.models.glm5_next.paging import Group, Paging
from replayssm.models.glm5_next.pieces import float_matmul, pieces
from replayssm.models.glm5_next.triton_indexer import selection_width

_NORM_EPS = 1e-6


class SharedSelection:
    """What the last accepted token of every sequence attends to, kept for the draft steps behind the first.

    With `index_share_for_mtp_iteration` they attend to the same cached tokens and to no newer one, themselves included.
    It is kept in one tensor of a fixed address, so that it passes from one CUDA graph to another.
    """

    def __init__(self, width: int) -> None:
        """Keep up to `width` tokens of each query."""
        self._width = width
        self._kept: torch.Tensor | None = None
        self._step: torch.Tensor | None = None

    def begin(self, num_tokens: int, capacity: int, device: torch.device) -> None:
        """Prepare for a draft step of `num_tokens`; called outside of graphs, before every step.

        Args:
            capacity: at least the tokens of any decode step, the same in every call.
        """
        if self._kept is None:
            self._kept = self._empty(capacity, device)
        self._step = self._kept if num_tokens <= capacity else self._empty(num_tokens, device)

    def _empty(self, rows: int, device: torch.device) -> torch.Tensor:
        return torch.full((rows, self._width), -1, dtype=torch.int32, device=device)

    def record(self, tokens: slice, selected: torch.Tensor) -> None:
        """Take the choice [n, Q, M] of the group that has `tokens` of the first draft step."""
        assert self._step is not None
        rows = selected.flatten(0, 1)
        self._step[tokens] = F.pad(rows, (0, self._width - rows.size(1)), value=-1)

    @torch.inference_mode()
    def keep(self, tokens: torch.Tensor) -> None:
        """Keep the choice of one token of every sequence: `tokens` [N] are indices among the step's."""
        assert self._step is not None
        assert self._kept is not None
        self._kept[: tokens.size(0)] = self._step[tokens]

    def reuse(self, num_sequences: int) -> torch.Tensor:
        """Return the kept choice, [N, 1, width] int32."""
        assert self._kept is not None
        return self._kept[:num_sequences, None]


class Indexer(nn.Module):
    """Every rank holds all of it, so that all ranks choose the same tokens. A GPU decodes with `triton_indexer`."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device, prefix: str) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.pool, self.top_pools = config.index_kpool, config.index_topk // config.index_kpool
        hidden = config.hidden_size

        build = Projections(config, dtype, device, prefix)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.wq_b = build.column('wq_b', config.q_lora_rank, self.heads * self.dim, False)
        self.wk = build.column('wk', hidden, self.dim, False)
        self.k_norm = nn.LayerNorm(self.dim, eps=_NORM_EPS, dtype=dtype, device=device)
        self.weights_proj = nn.Linear(hidden, self.heads, bias=False, dtype=dtype, device=device)
        self.index_kpool_compress_ape = parameter(self.pool, self.dim)
        self.index_kpool_compress_gate = parameter(self.dim, hidden)

    @property
    def width(self) -> int:
        """Tokens that `select` returns for a query at most."""
        return selection_width(self.top_pools, self.pool)

    def write(self, x: torch.Tensor, pool_cache: torch.Tensor, tail: torch.Tensor, paging: Paging) -> None:
        """Cache the keys of the pools that this step completes.

        Args:
            x: [T, hidden].
            pool_cache, tail: see `write_pools`; mutated in place.
        """
        keys, logits = self.k_norm(self.wk(x)), F.linear(x, self.index_kpool_compress_gate)
        operator = triton_indexer.write_pools if x.is_cuda and not paging.groups[0].is_prompt else write_pools
        operator(keys, logits, self.index_kpool_compress_ape, pool_cache, tail, paging)

    def select(self, q_latent: torch.Tensor, x: torch.Tensor, pool_cache: torch.Tensor, group: Group) -> torch.Tensor:
        """Tokens that each query attends to, [n, Q, M] int32; see `select_tokens`.

        Args:
            q_latent: [n, Q, q_lora_rank], x: [n, Q, hidden].
        """
        queries = self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim))
        weights = F.linear(x.float(), self.weights_proj.weight.float()) * self.heads**-0.5
        operator = triton_indexer.select_tokens if x.is_cuda and not group.is_prompt else select_tokens
        return operator(queries, weights, pool_cache, group, self.pool, self.top_pools)


def write_pools(
    keys: torch.Tensor,
    logits: torch.Tensor,
    ape: torch.Tensor,
    pool_cache: torch.Tensor,
    tail: torch.Tensor,
    paging: Paging,
) -> None:
    """Write a step's keys into the tail ring, and those of its pools into the cache.

    A pool may begin in an earlier step: the tail ring keeps the newest tokens, and a token that turns out to be a
    rejected draft is overwritten by the one that takes its position, in the ring as in the pool that it completed.
    Every token writes, so that shapes do not depend on positions: those of one pool write the same key, or what is
    there already if the pool is not complete, and those of one ring row write the newest of them.

    Args:
        keys, logits: [T, dim], of the step's tokens.
        ape: [pool, dim], what a place in the pool adds to its logits.
        pool_cache: [blocks, block_size / pool, dim], mutated in place.
        tail: [N, rows, 2, dim], row p mod rows holds key and gate logits of position p; mutated in place.
    """
    (pool, _), rows, count = ape.shape, tail.size(1), keys.size(0)
    entries, position, source = torch.stack([keys, logits], 1), paging.position, paging.source
    token = torch.arange(count, device=keys.device)
    back = torch.arange(pool - 1, -1, -1, device=keys.device)
    older = tail[paging.slot[:, None], (position[:, None] - back) % rows].to(entries.dtype)
    newer = entries[(token[:, None] - back).clamp_min(0)]
    is_older = back > paging.since_start[:, None]
    members = torch.where(is_older[..., None, None], older, newer)
    weights = (members[:, :, 1].float() + ape.float()).softmax(1).to(keys.dtype)
    pooled = (weights * members[:, :, 0]).sum(1).to(pool_cache.dtype)

    missing = pool - 1 - position % pool
    completed = pooled[(token + missing).clamp_max(count - 1)]
    block, row = paging.block, paging.offset // pool
    value = torch.where((missing <= paging.until_end)[:, None], completed, pool_cache[block, row])
    pool_cache[block[source], row[source]] = value[source]
    newest = entries[token + paging.until_end // rows * rows].to(tail.dtype)
    tail[paging.slot[source], position[source] % rows] = newest[source]


def select_tokens(
    queries: torch.Tensor, weights: torch.Tensor, pool_cache: torch.Tensor, group: Group, pool: int, top_pools: int
) -> torch.Tensor:
    """Tokens that each query attends to: the best complete pools, and the incomplete one it stands in.

    Args:
        queries: [n, Q, heads, dim], weights: [n, Q, heads] float32.
        pool_cache: [blocks, block_size / pool, dim].

    Returns:
        [n, Q, M] int32 positions in any order, -1 behind fewer than M; M is the `selection_width` of `top_pools`, or
        less of a short page table.
    """
    num_pools, position = group.blocks.size(1) * pool_cache.size(1), group.position
    query_bytes = num_pools * (queries.size(2) + 2) * 4
    windows = list(pieces(position.size(1), query_bytes))
    sequence_bytes = num_pools * queries.size(3) * pool_cache.element_size() + windows[0].stop * query_bytes
    chosen = []
    for rows in pieces(position.size(0), sequence_bytes):
        pools = pool_cache[group.blocks[rows]].flatten(1, 2)
        parts = []
        for window in windows:
            here = position[rows, window]
            scores = score(queries[rows, window], weights[rows, window], pools, here, pool)
            values, indices = scores.topk(min(top_pools, num_pools), -1, sorted=False)
            parts.append(expand(values, indices, here, pool))
        chosen.append(torch.cat(parts, 1))
    return torch.cat(chosen)


def score(
    queries: torch.Tensor, weights: torch.Tensor, pools: torch.Tensor, position: torch.Tensor, pool: int
) -> torch.Tensor:
    """Score of each pool for each query, [n, Q, P] float32, -inf for incomplete pools.

    Args:
        queries: [n, Q, heads, dim], weights: [n, Q, heads] float32.
        pools: [n, P, dim].
        position: [n, Q], where the queries stand.
    """
    heads, dim = queries.shape[2:]
    scores = float_matmul(queries.to(pools.dtype).flatten(1, 2), pools.mT).mul_(dim**-0.5).relu_()
    scores = (weights[:, :, None] @ scores.unflatten(1, (-1, heads))).squeeze(2)
    is_complete = torch.arange(pools.size(1), device=pools.device) < (position[..., None] + 1) // pool
    return scores.masked_fill(~is_complete, float('-inf'))


def expand(values: torch.Tensor, indices: torch.Tensor, position: torch.Tensor, pool: int) -> torch.Tensor:
    """Tokens [n, Q, M] int32 of the chosen pools and of the incomplete one that a query stands in; -1 for none.

    Args:
        values, indices: [n, Q, K], the best scores and whose they are.
        position: [n, Q], where the queries stand.
    """
    within = torch.arange(pool, device=values.device)
    pooled = indices[..., None] * pool + within
    pooled = pooled.masked_fill((values == float('-inf'))[..., None], -1).flatten(-2)
    newest = ((position + 1) // pool * pool)[..., None] + within[:-1]
    newest = newest.masked_fill(newest > position[..., None], -1)
    padding = selection_width(indices.size(-1), pool) - pooled.size(-1) - newest.size(-1)
    return F.pad(torch.cat([pooled, newest], -1), (0, padding), value=-1).int()
