"""Which cached tokens a query attends to: pools of neighbouring tokens scored by one key each (k-pool indexer)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from replayssm.models.glm5_next.linear import Projections
from replayssm.models.glm5_next.paging import Group, Paging

_NORM_EPS = 1e-6


class SharedSelection:
    """What the last accepted token of every sequence attends to, kept for the draft steps behind the first.

    With `index_share_for_mtp_iteration` they attend to the same cached tokens and to no newer one, themselves included.
    """

    def __init__(self) -> None:
        self._groups: list[torch.Tensor] = []
        self._kept: torch.Tensor | None = None

    def begin(self) -> None:
        """Forget: a first draft step follows."""
        self._groups, self._kept = [], None

    def record(self, selected: torch.Tensor) -> None:
        """Add the choice [n, Q, M] of one group of the first draft step."""
        self._groups.append(selected.flatten(0, 1))

    def keep(self, tokens: torch.Tensor) -> None:
        """Keep the choice of one token of every sequence: `tokens` [N] are indices among the step's."""
        if len(self._groups) == 1:
            self._kept = self._groups[0][tokens]
        else:
            # Prompts see as many cached tokens as they have pages.
            rows = [row for group in self._groups for row in group.unbind(0)]
            self._kept = nn.utils.rnn.pad_sequence([rows[index] for index in tokens.tolist()], batch_first=True)
        self._groups = []

    def reuse(self, num_cached: int) -> torch.Tensor:
        """Return the kept choice, [N, 1, num_cached] bool.

        Raises:
            RuntimeError: no first draft step came before.
        """
        if self._kept is None:
            raise RuntimeError('a later draft step reuses the choice of a first one, and there was none')
        return F.pad(self._kept, (0, num_cached - self._kept.size(1)))[:, None]


class Indexer(nn.Module):
    """Every rank holds all of it, so that all ranks choose the same tokens."""

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

    def write(self, x: torch.Tensor, pool_cache: torch.Tensor, tail: torch.Tensor, paging: Paging) -> None:
        """Cache the keys of the pools that this step completes.

        A pool may begin in an earlier step: the tail ring keeps the newest tokens, and a token that turns out to be a
        rejected draft is overwritten by the one that takes its position, in the ring as in the pool that it completed.

        Args:
            x: [T, hidden].
            pool_cache: [blocks, block_size / pool, dim], mutated in place.
            tail: [N, rows, 2, dim], row p mod rows holds key and gate logits of position p; mutated in place.
        """
        keys = self.k_norm(self.wk(x))
        entries = torch.stack([keys, F.linear(x, self.index_kpool_compress_gate)], 1)
        rows = tail.size(1)
        complete = (paging.position % self.pool == self.pool - 1).nonzero().squeeze(-1)
        back = torch.arange(self.pool - 1, -1, -1, device=x.device)
        ring_row = (paging.position[complete, None] - back) % rows
        older = tail[paging.slot[complete, None], ring_row].to(entries.dtype)
        newer = entries[(complete[:, None] - back).clamp_min(0)]
        is_older = back > paging.since_start[complete, None]
        members = torch.where(is_older[..., None, None], older, newer)
        weights = (members[:, :, 1].float() + self.index_kpool_compress_ape.float()).softmax(1).to(keys.dtype)
        pooled = (weights * members[:, :, 0]).sum(1)
        pool_cache[paging.block[complete], paging.offset[complete] // self.pool] = pooled.to(pool_cache.dtype)
        kept = (paging.until_end < rows).nonzero().squeeze(-1)
        tail[paging.slot[kept], paging.position[kept] % rows] = entries[kept].to(tail.dtype)

    def select(self, q_latent: torch.Tensor, x: torch.Tensor, pool_cache: torch.Tensor, group: Group) -> torch.Tensor:
        """Tokens that each query attends to: the best complete pools, and the incomplete one it stands in.

        Args:
            q_latent: [n, Q, q_lora_rank], x: [n, Q, hidden].

        Returns:
            [n, Q, M] bool over the cached positions.
        """
        score = self.score(q_latent, x, pool_cache, group)
        best = score.topk(min(self.top_pools, score.size(-1)), -1).indices
        is_complete = score != float('-inf')
        chosen = torch.zeros_like(is_complete).scatter_(-1, best, True) & is_complete
        chosen = chosen.repeat_interleave(self.pool, -1)
        position = torch.arange(chosen.size(-1), device=x.device)
        first_tail = (group.position + 1) // self.pool * self.pool
        in_tail = (position >= first_tail[..., None]) & (position <= group.position[..., None])
        return chosen | in_tail

    def score(self, q_latent: torch.Tensor, x: torch.Tensor, pool_cache: torch.Tensor, group: Group) -> torch.Tensor:
        """Score of each pool for each query, [n, Q, P] float32, -inf for incomplete pools; arguments as `select`'s."""
        queries = self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim)).float()
        weights = F.linear(x.float(), self.weights_proj.weight.float()) * self.heads**-0.5
        pools = pool_cache[group.blocks].flatten(1, 2).float()
        scores = torch.einsum('nqhd,npd->nqhp', queries, pools).mul(self.dim**-0.5).relu()
        score = torch.einsum('nqh,nqhp->nqp', weights, scores)
        pool_index = torch.arange(pools.size(1), device=x.device)
        is_complete = pool_index < (group.position[..., None] + 1) // self.pool
        return score.masked_fill(~is_complete, float('-inf'))
