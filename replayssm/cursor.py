"""The cursor rules: which records of a ring are live, where the next ones go, and when a checkpoint is rewritten.

A slot stores two positions, see `layout.CURSOR_FIELDS`. LMDeploy advances a sequence's history by what was accepted,
so `valid = history - checkpoint_pos` counts the committed records by itself: accepting costs nothing, and rejecting
drafts is not counting them; their rows are overwritten by the next window. Everything is tensor arithmetic on the
device without synchronisation, done once per forward before the first layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

SLOT, VALID, READ_ROW, WRITE_ROW, LENGTH, FLUSH = range(6)
"""Columns of a cursor table: slot (-1: padding), committed records, ring row of the first of them, ring row of the
window's first token, tokens of the window, and 1 where the committed records are folded into the checkpoint."""
CURSOR_COLUMNS = 8
"""Columns are padded to 32 bytes a row."""


class Advance(NamedTuple):
    """What one decode forward does to a batch's cursors.

    `table` is int32 [B, CURSOR_COLUMNS]; `positions` int32 [B, 2] is what the slots store afterwards. The others are
    int64 scalars on the device: `windows` counts live rows, and over those `flushed` counts checkpoints, `appended`,
    `replayed` (committed ones read back) and `rejected` records.
    """

    table: torch.Tensor
    positions: torch.Tensor
    windows: torch.Tensor
    flushed: torch.Tensor
    appended: torch.Tensor
    replayed: torch.Tensor
    rejected: torch.Tensor


def advance_decode(
    slots: torch.Tensor,
    history: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    buffer_len: int,
    ring_rows: int,
) -> Advance:
    """Advance the cursors of a decode or verify step.

    Args:
        slots: [B] state slots, -1 for padding rows.
        history: [B] committed tokens before this step.
        lengths: [B] tokens of this step's window.
        positions: int32 [B, 2], what the slots store now; rows of padding are ignored.
        buffer_len, ring_rows: L and R.

    A row flushes when its committed records and the window together exceed L. Only committed records are folded, so
    the checkpoint then stands at `history`.
    """
    live = slots >= 0
    history, lengths = history.to(torch.int32), lengths.to(torch.int32)
    checkpoint_pos, end_pos = positions.unbind(-1)
    valid = history - checkpoint_pos
    flush = live & (valid + lengths > buffer_len)
    table = _table(slots, live, valid, checkpoint_pos % ring_rows, history % ring_rows, lengths, flush)
    new_positions = torch.stack([torch.where(flush, history, checkpoint_pos), history + lengths], -1)
    rejected = torch.where(live, (end_pos - history).clamp_min(0), 0)
    return Advance(
        table,
        torch.where(live[:, None], new_positions, positions),
        live.sum(),
        flush.sum(),
        torch.where(live, lengths, 0).sum(),
        table[:, VALID].sum(),
        rejected.sum(),
    )


def read_prefill(slots: torch.Tensor, history: torch.Tensor, positions: torch.Tensor, ring_rows: int) -> torch.Tensor:
    """Cursor table of the states that a prefill starts from: int32 [B, CURSOR_COLUMNS].

    A sequence without history starts from zeros and names no slot, whatever an earlier owner left there. A prefill
    folds all committed records and writes the checkpoint itself; afterwards both stored positions are behind it.
    """
    live = (slots >= 0) & (history > 0)
    history = history.to(torch.int32)
    checkpoint_pos = positions[:, 0]
    zero = torch.zeros_like(history)
    valid = history - checkpoint_pos
    return _table(slots, live, valid, checkpoint_pos % ring_rows, history % ring_rows, zero, zero)


def _table(
    slots: torch.Tensor,
    live: torch.Tensor,
    valid: torch.Tensor,
    read_row: torch.Tensor,
    write_row: torch.Tensor,
    lengths: torch.Tensor,
    flush: torch.Tensor,
) -> torch.Tensor:
    columns = [torch.where(live, slots, -1), torch.where(live, valid, 0), read_row, write_row, lengths, flush]
    padding = torch.zeros_like(valid)
    return torch.stack([column.to(torch.int32) for column in columns] + [padding] * (CURSOR_COLUMNS - 6), -1)
