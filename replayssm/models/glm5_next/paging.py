"""Where the tokens of one step stand: in their sequences, in the paged caches, and in groups that attend together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of a step that have the same number of new tokens.

    Attributes:
        tokens: where these sequences' tokens are among the step's.
        blocks: [n, W] int64, pages of each sequence.
        position: [n, Q] int64, absolute position of every token.
        length: [n] int64, cached tokens of each sequence, the new ones included.
    """

    tokens: slice
    blocks: torch.Tensor
    position: torch.Tensor
    length: torch.Tensor


@dataclass(frozen=True, slots=True)
class Paging:
    """One step's layout; T tokens of N sequences, packed.

    Attributes:
        slot: [T] int64, state slot of every token's sequence; what padding writes goes to slot 0, which is reserved.
        position: [T] int64, absolute position of every token.
        since_start: [T] int64, tokens of the step before it in its sequence.
        until_end: [T] int64, tokens of the step behind it in its sequence.
        block, offset: [T] int64, page of every token and its row there.
        groups: a decode step is one group, a prompt a group of its own.
    """

    slot: torch.Tensor
    position: torch.Tensor
    since_start: torch.Tensor
    until_end: torch.Tensor
    block: torch.Tensor
    offset: torch.Tensor
    groups: tuple[Group, ...]


def build_paging(attn_metadata: Any, state_ids: torch.Tensor, num_tokens: int, block_size: int) -> Paging:
    """Build from LMDeploy's attention metadata and state slots [N], -1 for padding."""
    lengths, ends = attn_metadata.q_seqlens.long(), attn_metadata.kv_seqlens.long()
    pages = attn_metadata.block_offsets.long()
    sequence = torch.repeat_interleave(
        torch.arange(lengths.size(0), device=lengths.device), lengths, output_size=num_tokens
    )
    starts = lengths.cumsum(0) - lengths
    since_start = torch.arange(num_tokens, device=lengths.device) - starts[sequence]
    position = (ends - lengths)[sequence] + since_start
    return Paging(
        slot=state_ids.clamp_min(0).long()[sequence],
        position=position,
        since_start=since_start,
        until_end=lengths[sequence] - 1 - since_start,
        block=pages[sequence, position // block_size],
        offset=position % block_size,
        groups=tuple(_groups(attn_metadata.is_decoding, pages, position, lengths, ends, block_size)),
    )


def _groups(
    is_decoding: bool,
    pages: torch.Tensor,
    position: torch.Tensor,
    lengths: torch.Tensor,
    ends: torch.Tensor,
    block_size: int,
) -> Iterator[Group]:
    if is_decoding:
        yield Group(slice(None), pages, position.unflatten(0, (pages.size(0), -1)), ends)
        return
    start = 0
    for i, (length, end) in enumerate(zip(lengths.tolist(), ends.tolist(), strict=True)):
        tokens = slice(start, start + length)
        used = pages[i : i + 1, : -(-end // block_size)]
        yield Group(tokens, used, position[tokens][None], ends[i : i + 1])
        start += length
