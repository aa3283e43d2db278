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
        is_prompt: whether these are tokens of a prompt, so that n is 1 and Q may be large.
    """

    tokens: slice
    blocks: torch.Tensor
    position: torch.Tensor
    length: torch.Tensor
    is_prompt: bool


@dataclass(frozen=True, slots=True)
class Paging:
    """One step's layout; T tokens of N sequences, packed.

    A CUDA graph pads a decode step with sequences that have no slot, positions from 0 and pages 0, which may be a real
    sequence's. `source` keeps them from writing there: what is written for token t is what token `source[t]` writes.

    Attributes:
        source: [T] int64, the token itself, or for padding the first token: a decode step begins with a real one.
        slot: [T] int64, state slot of every token's sequence; 0 for padding, which LMDeploy reserves.
        position: [T] int64, absolute position of every token.
        since_start: [T] int64, tokens of the step before it in its sequence.
        until_end: [T] int64, tokens of the step behind it in its sequence.
        block, offset: [T] int64, page of every token and its row there.
        groups: a decode step is one group, a prompt a group of its own.
    """

    source: torch.Tensor
    slot: torch.Tensor
    position: torch.Tensor
    since_start: torch.Tensor
    until_end: torch.Tensor
    block: torch.Tensor
    offset: torch.Tensor
    groups: tuple[Group, ...]


def build_paging(attn_metadata: Any, state_ids: torch.Tensor, num_tokens: int, block_size: int) -> Paging:
    """Build from LMDeploy's attention metadata and state slots [N], -1 for padding.

    A decode step, where all sequences have the same number of tokens, never waits for the device.
    """
    lengths, ends = attn_metadata.q_seqlens.long(), attn_metadata.kv_seqlens.long()
    pages = attn_metadata.block_offsets.long()
    token = torch.arange(num_tokens, device=pages.device)
    if attn_metadata.is_decoding:
        window = num_tokens // lengths.size(0)
        sequence, since_start = token // window, token % window
        until_end = window - 1 - since_start
    else:
        sequence = torch.repeat_interleave(
            torch.arange(lengths.size(0), device=pages.device), lengths, output_size=num_tokens
        )
        since_start = token - (lengths.cumsum(0) - lengths)[sequence]
        until_end = lengths[sequence] - 1 - since_start
    # The bounds are padding's; a real token is within its sequence's pages.
    position = ((ends - lengths)[sequence] + since_start).clamp_min(0)
    page = (position // block_size).clamp_max(pages.size(1) - 1)
    slots = state_ids.long()[sequence]
    return Paging(
        source=torch.where(slots >= 0, token, 0),
        slot=slots.clamp_min(0),
        position=position,
        since_start=since_start,
        until_end=until_end,
        block=pages[sequence, page],
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
        tokens = slice(0, position.size(0))
        yield Group(tokens, pages, position.unflatten(0, (pages.size(0), -1)), ends, is_prompt=False)
        return
    start = 0
    for i, (length, end) in enumerate(torch.stack([lengths, ends], 1).tolist()):
        tokens = slice(start, start + length)
        used = pages[i : i + 1, : -(-end // block_size)]
        yield Group(tokens, used, position[tokens][None], ends[i : i + 1], is_prompt=True)
        start += length
