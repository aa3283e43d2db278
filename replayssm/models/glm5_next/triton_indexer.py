"""The indexer of decode steps in three Triton kernels around a top-k; PyTorch launches 70 and copies all pool keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replayssm.models.glm5_next.paging import Group, Paging
from replayssm.models.glm5_next.pieces import pieces

BLOCK_POOLS = 64
"""Pools that a program scores, for all queries of a sequence."""
BLOCK_PLACES = 1024


@triton.jit
def _write_pools_kernel(
    keys,
    logits,
    ape,
    pool_cache,
    tail,
    source,
    slot,
    position,
    since_start,
    block,
    offset,
    stride_block,
    stride_slot,
    POOL: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BD: tl.constexpr,
):
    """One token: its row of the tail ring, and the key of the pool that it completes."""
    i_t = tl.program_id(0).to(tl.int64)
    if tl.load(source + i_t) == i_t:
        o_d, o_j = tl.arange(0, BD), tl.arange(0, POOL)
        mask = o_d < DIM
        p_tail = tail + tl.load(slot + i_t) * stride_slot
        i_position, since = tl.load(position + i_t), tl.load(since_start + i_t)
        if i_position % POOL == POOL - 1:
            dtype: tl.constexpr = keys.dtype.element_ty
            back = POOL - 1 - o_j
            place = o_j[:, None] * DIM + o_d[None, :]
            b_key = _members(keys, p_tail, i_t, i_position, since, back, o_d, mask, ROWS, DIM)
            b_logit = _members(logits, p_tail + DIM, i_t, i_position, since, back, o_d, mask, ROWS, DIM)
            b_logit += tl.load(ape + place, mask=mask[None, :], other=0.0).to(tl.float32)
            b_weight = tl.exp(b_logit - tl.max(b_logit, 0)[None, :])
            # rounded where PyTorch rounds
            b_weight = (b_weight / tl.sum(b_weight, 0)[None, :]).to(dtype).to(tl.float32)
            b_pool = tl.sum((b_weight * b_key).to(dtype).to(tl.float32), 0)
            p_pool = pool_cache + tl.load(block + i_t) * stride_block + tl.load(offset + i_t) // POOL * DIM
            tl.store(p_pool + o_d, b_pool, mask=mask)
        p_row = p_tail + i_position % ROWS * (2 * DIM) + o_d
        tl.store(p_row, tl.load(keys + i_t * DIM + o_d, mask=mask), mask=mask)
        tl.store(p_row + DIM, tl.load(logits + i_t * DIM + o_d, mask=mask), mask=mask)


@triton.jit
def _members(entries, p_tail, i_t, i_position, since, back, o_d, mask, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Keys or logits [POOL, BD] of the tokens `back` positions before, from this step or else from the ring."""
    is_newer = (back <= since)[:, None]
    p_newer = entries + ((i_t - back) * DIM)[:, None] + o_d[None, :]
    p_older = p_tail + ((i_position - back) % ROWS * (2 * DIM))[:, None] + o_d[None, :]
    newer = tl.load(p_newer, mask=mask[None, :] & is_newer, other=0.0).to(tl.float32)
    return newer + tl.load(p_older, mask=mask[None, :] & (is_newer == 0), other=0.0).to(tl.float32)


@triton.jit
def _score_kernel(
    queries,
    weights,
    pool_cache,
    blocks,
    position,
    score,
    stride_block,
    scale,
    num_pools,
    pages,
    PER_BLOCK: tl.constexpr,
    POOL: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    BP: tl.constexpr,
):
    """Scores of BP pools for the queries of one sequence, -inf for pools that are not complete."""
    i_n = tl.program_id(1).to(tl.int64)
    o_p = tl.program_id(0) * BP + tl.arange(0, BP)
    o_h, o_d = tl.arange(0, BH), tl.arange(0, BD)
    mask_h, mask_d = o_h < HEADS, o_d < DIM
    # no query sees more than the last one does
    newest = tl.load(position + i_n * QUERIES + QUERIES - 1)
    is_read = o_p < (newest + 1) // POOL
    page = tl.load(blocks + i_n * pages + o_p // PER_BLOCK, mask=is_read & (o_p < num_pools), other=0).to(tl.int64)
    p_key = pool_cache + (page * stride_block + o_p % PER_BLOCK * DIM)[:, None] + o_d[None, :]
    b_key = tl.load(p_key, mask=is_read[:, None] & mask_d[None, :], other=0.0)
    for i in tl.static_range(QUERIES):
        i_q = i_n * QUERIES + i
        p_query = queries + i_q * (HEADS * DIM) + o_h[None, :] * DIM + o_d[:, None]
        b_q = tl.load(p_query, mask=mask_d[:, None] & mask_h[None, :], other=0.0)
        b_w = tl.load(weights + i_q * HEADS + o_h, mask=mask_h, other=0.0)
        b_s = tl.maximum(tl.dot(b_key, b_q.to(b_key.dtype), input_precision='ieee') * scale, 0.0)
        is_complete = o_p < (tl.load(position + i_q) + 1) // POOL
        b_score = tl.where(is_complete, tl.sum(b_s * b_w[None, :], 1), float('-inf'))
        tl.store(score + i_q * num_pools + o_p, b_score, mask=o_p < num_pools)


@triton.jit
def _expand_kernel(
    indices,
    values,
    position,
    selected,
    POOL: tl.constexpr,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
):
    """Tokens of the chosen pools and of the incomplete one that a query stands in; -1 for none."""
    i_q = tl.program_id(0).to(tl.int64)
    o_m = tl.program_id(1) * BM + tl.arange(0, BM)
    i_chosen = o_m // POOL
    is_pooled = i_chosen < CHOSEN
    value = tl.load(values + i_q * CHOSEN + i_chosen, mask=is_pooled, other=float('-inf'))
    index = tl.load(indices + i_q * CHOSEN + i_chosen, mask=is_pooled, other=0)
    pooled = tl.where(value == float('-inf'), -1, index * POOL + o_m % POOL)
    here = tl.load(position + i_q)
    newest = (here + 1) // POOL * POOL + o_m - CHOSEN * POOL
    newest = tl.where((newest <= here) & (o_m < CHOSEN * POOL + POOL - 1), newest, -1)
    tl.store(selected + i_q * WIDTH + o_m, tl.where(is_pooled, pooled, newest).to(tl.int32), mask=o_m < WIDTH)


def selection_width(num_pools: int, pool: int) -> int:
    """Tokens of so many pools and of an incomplete one: a multiple of 8, which tensor cores like."""
    return -(-(num_pools * pool + pool - 1) // 8) * 8


def write_pools(
    keys: torch.Tensor,
    logits: torch.Tensor,
    ape: torch.Tensor,
    pool_cache: torch.Tensor,
    tail: torch.Tensor,
    paging: Paging,
) -> None:
    """`indexer.write_pools` in a decode step, whose windows are no longer than the ring.

    Args:
        keys, logits: [T, dim], of the step's tokens.
        ape: [pool, dim]; the pool is a power of two.
        pool_cache: [blocks, block_size / pool, dim], a block of it contiguous; mutated in place.
        tail: [N, rows, 2, dim], a slot of it contiguous; mutated in place.
    """
    (pool, dim), rows = ape.shape, tail.size(1)
    _write_pools_kernel[(keys.size(0),)](
        keys.contiguous(),
        logits.contiguous(),
        ape,
        pool_cache,
        tail,
        paging.source,
        paging.slot,
        paging.position,
        paging.since_start,
        paging.block,
        paging.offset,
        pool_cache.stride(0),
        tail.stride(0),
        POOL=pool,
        ROWS=rows,
        DIM=dim,
        BD=triton.next_power_of_2(dim),
        num_warps=1,
    )


def select_tokens(
    queries: torch.Tensor, weights: torch.Tensor, pool_cache: torch.Tensor, group: Group, pool: int, top_pools: int
) -> torch.Tensor:
    """`indexer.select_tokens` in a decode step; a block of `pool_cache` is contiguous."""
    num_pools, position = group.blocks.size(1) * pool_cache.size(1), group.position
    chosen = []
    for rows in pieces(position.size(0), position.size(1) * num_pools * 4):
        scores = score(queries[rows], weights[rows], pool_cache, group.blocks[rows], position[rows], pool)
        values, indices = scores.topk(min(top_pools, num_pools), -1, sorted=False)
        chosen.append(expand(values, indices, position[rows], pool))
    return torch.cat(chosen)


def score(
    queries: torch.Tensor,
    weights: torch.Tensor,
    pool_cache: torch.Tensor,
    blocks: torch.Tensor,
    position: torch.Tensor,
    pool: int,
) -> torch.Tensor:
    """`indexer.score` of every pool of the page table, [n, Q, P] float32, read where it is cached.

    Args:
        queries: [n, Q, heads, dim].
        weights: [n, Q, heads] float32.
        pool_cache: [blocks, block_size / pool, dim], a block of it contiguous.
        blocks: [n, W] int64, the page table; position: [n, Q] int64, where the queries stand.
    """
    n, count, heads, dim = queries.shape
    num_pools = blocks.size(1) * pool_cache.size(1)
    scores = torch.empty(n, count, num_pools, dtype=torch.float32, device=queries.device)
    _score_kernel[(triton.cdiv(num_pools, BLOCK_POOLS), n)](
        queries.contiguous(),
        weights.contiguous(),
        pool_cache,
        blocks.contiguous(),
        position.contiguous(),
        scores,
        pool_cache.stride(0),
        dim**-0.5,
        num_pools,
        blocks.size(1),
        PER_BLOCK=pool_cache.size(1),
        POOL=pool,
        QUERIES=count,
        HEADS=heads,
        DIM=dim,
        BH=max(16, triton.next_power_of_2(heads)),
        BD=max(16, triton.next_power_of_2(dim)),
        BP=BLOCK_POOLS,
        num_warps=4,
    )
    return scores


def expand(values: torch.Tensor, indices: torch.Tensor, position: torch.Tensor, pool: int) -> torch.Tensor:
    """`indexer.expand`."""
    n, count, chosen = indices.shape
    width = selection_width(chosen, pool)
    selected = torch.empty(n, count, width, dtype=torch.int32, device=indices.device)
    _expand_kernel[(n * count, triton.cdiv(width, BLOCK_PLACES))](
        indices.contiguous(),
        values.contiguous(),
        position.contiguous(),
        selected,
        POOL=pool,
        CHOSEN=chosen,
        WIDTH=width,
        BM=BLOCK_PLACES,
        num_warps=4,
    )
    return selected
