"""`attention.attend_gathered` in two Triton kernels: chosen tokens are read from the cache where they are.

Scores are taken as [tokens, heads] and outputs as [rank, heads]: the 16 heads that one of four ranks has are the narrow
side of both products. Tensor cores of Hopper GPUs take 16 columns, while they would compute 64 rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from replayssm.models.glm5_next.paging import Group

BLOCK_HEADS = 16
"""Heads of a program; outputs of rank 512 are 64 registers a thread."""
TILE_BYTES = 16384
"""Of the tokens that a program reads at a time, three tiles in flight: 286 us where 64 KiB and two took 506."""
PROGRAMS = 792
"""As many as fill a large GPU: with fewer queries their tokens are divided among programs."""
NOTHING = tl.constexpr(-1e30)
"""Logarithm of the weight of no token at all; finite, so that differences stay numbers."""


@triton.jit
def _find(
    p_selected,
    p_blocks,
    o_s,
    last,
    stride_block,
    PAGES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
):
    """Where the cached tokens begin that a query has chosen in places `o_s`, and which of them are to be read.

    Rows of padding may name tokens behind the table; a recycled page may hold NaN, which is not read.
    """
    chosen = tl.load(p_selected + o_s, mask=o_s < last, other=-1)
    is_chosen = (chosen >= 0) & (chosen < PAGES * BLOCK_SIZE)
    page = tl.load(p_blocks + chosen // BLOCK_SIZE, mask=is_chosen, other=0).to(tl.int64)
    return page * stride_block + chosen % BLOCK_SIZE * RANK, is_chosen


@triton.jit
def _attend_kernel(
    query,
    selected,
    latents,
    blocks,
    out,
    log_weight,
    exponent_scale,
    stride_block,
    COUNT: tl.constexpr,
    PAGES: tl.constexpr,
    SPAN: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
):
    i_split = tl.program_id(0)
    i_query = tl.program_id(1).to(tl.int64)
    i_part = i_query * tl.num_programs(0) + i_split
    o_h = tl.program_id(2) * BH + tl.arange(0, BH)
    o_r, o_t = tl.arange(0, BR), tl.arange(0, BT)
    mask_h, mask_r = o_h < HEADS, o_r < RANK
    mask_out = mask_r[:, None] & mask_h[None, :]
    o_out = o_h[None, :] * RANK + o_r[:, None]
    b_q = tl.load(query + i_query * (HEADS * RANK) + o_out, mask=mask_out, other=0.0)
    p_selected, p_blocks = selected + i_query * COUNT, blocks + i_query // QUERIES * PAGES
    b_max = tl.full([BH], NOTHING, tl.float32)
    b_sum = tl.zeros([BH], tl.float32)
    b_out = tl.zeros([BR, BH], tl.float32)
    first = i_split * SPAN
    last = min(first + SPAN, COUNT)
    row, is_chosen = _find(p_selected, p_blocks, first + o_t, last, stride_block, PAGES, BLOCK_SIZE, RANK)
    for start in range(first, last, BT):
        mask_t = is_chosen[:, None] & mask_r[None, :]
        b_c = tl.load(latents + row[:, None] + o_r[None, :], mask=mask_t, other=0.0)
        is_read = is_chosen
        # A tile ahead, so that the cache does not wait for the page table.
        row, is_chosen = _find(p_selected, p_blocks, start + BT + o_t, last, stride_block, PAGES, BLOCK_SIZE, RANK)
        b_s = tl.dot(b_c, b_q, input_precision='ieee') * exponent_scale
        b_s = tl.where(is_read[:, None], b_s, float('-inf'))
        b_new = tl.maximum(b_max, tl.max(b_s, 0))
        b_p = tl.exp2(b_s - b_new[None, :])
        b_old = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_old + tl.sum(b_p, 0)
        b_out = tl.dot(tl.trans(b_c), b_p.to(b_c.dtype), b_out * b_old[None, :], input_precision='ieee')
        b_max = b_new
    b_out = b_out / tl.where(b_sum > 0, b_sum, 1.0)[None, :]
    b_log = tl.where(b_sum > 0, b_max + tl.log2(b_sum), NOTHING)
    tl.store(out + i_part * (HEADS * RANK) + o_out, b_out, mask=mask_out)
    tl.store(log_weight + i_part * HEADS + o_h, b_log, mask=mask_h)


@triton.jit
def _merge_kernel(
    parts,
    log_weight,
    out,
    SPLITS: tl.constexpr,
    BS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BR: tl.constexpr,
):
    """One head of one query: the mean of its parts by their weights."""
    i_row = tl.program_id(0).to(tl.int64) * SPLITS
    i_head, o_r, o_s = tl.program_id(1), tl.arange(0, BR), tl.arange(0, BS)
    p_log = log_weight + i_row * HEADS + i_head
    b_log = tl.load(p_log + o_s * HEADS, mask=o_s < SPLITS, other=float('-inf'))
    largest = tl.max(b_log, 0)
    total = tl.sum(tl.exp2(b_log - largest), 0)
    b_out = tl.zeros([BR], tl.float32)
    for i in range(SPLITS):
        weight = tl.exp2(tl.load(p_log + i * HEADS) - largest) / total
        p_part = parts + ((i_row + i) * HEADS + i_head) * RANK + o_r
        b_out += weight * tl.load(p_part, mask=o_r < RANK, other=0.0)
    tl.store(out + (tl.program_id(0).to(tl.int64) * HEADS + i_head) * RANK + o_r, b_out, mask=o_r < RANK)


def attend_fused(
    query: torch.Tensor,
    selected: torch.Tensor,
    latents: torch.Tensor,
    group: Group,
    scale: float,
    programs: int = PROGRAMS,
) -> torch.Tensor:
    """See `attention.attend_gathered`; `latents` are of the query's dtype, and a block of them is contiguous.

    A query without any token gets zeros. The number of splits depends on shapes alone, so that CUDA graphs stay valid.

    Args:
        programs: into how many the work is divided at least, as far as there are tokens for it.
    """
    (n, queries, heads, rank), count = query.shape, selected.size(-1)
    head_blocks = triton.cdiv(heads, BLOCK_HEADS)
    rows, tile = n * queries, max(16, TILE_BYTES // (triton.next_power_of_2(rank) * latents.element_size()))
    tiles = triton.cdiv(count, tile)
    span = tile * triton.cdiv(tiles, min(tiles, triton.cdiv(programs, rows * head_blocks)))
    splits = triton.cdiv(count, span)
    parts = torch.empty(rows, splits, heads, rank, dtype=torch.float32, device=query.device)
    log_weight = torch.empty(rows, splits, heads, dtype=torch.float32, device=query.device)
    block_rank = triton.next_power_of_2(rank)
    _attend_kernel[(splits, rows, head_blocks)](
        query.contiguous(),
        selected.contiguous(),
        latents,
        group.blocks.contiguous(),
        parts,
        log_weight,
        scale * math.log2(math.e),
        latents.stride(0),
        COUNT=count,
        PAGES=group.blocks.size(1),
        SPAN=span,
        QUERIES=queries,
        BLOCK_SIZE=latents.size(1),
        HEADS=heads,
        RANK=rank,
        BH=BLOCK_HEADS,
        BR=block_rank,
        BT=tile,
        num_warps=4,
        num_stages=3,
    )
    out = torch.empty(n, queries, heads, rank, dtype=query.dtype, device=query.device)
    _merge_kernel[(rows, heads)](
        parts,
        log_weight,
        out,
        SPLITS=splits,
        BS=triton.next_power_of_2(splits),
        HEADS=heads,
        RANK=rank,
        BR=block_rank,
        num_warps=1,
    )
    return out
