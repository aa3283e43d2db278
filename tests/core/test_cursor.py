"""The cursor rules as properties over random schedules of windows and accepts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm.cursor import FLUSH, LENGTH, READ_ROW, SLOT, VALID, WRITE_ROW, advance_decode, read_prefill


@given(data=st.data(), buffer_len=st.integers(1, 32), start=st.integers(0, 10_000))
def test_a_step_never_overwrites_a_live_record(data: st.DataObject, buffer_len: int, start: int) -> None:
    window = data.draw(st.integers(1, min(8, buffer_len)))
    rows = buffer_len + window
    slots, history = torch.tensor([1]), torch.tensor([start])
    positions = torch.full((1, 2), start, dtype=torch.int32)
    for _ in range(40):
        length = data.draw(st.integers(1, window))
        advance = advance_decode(slots, history, torch.tensor([length]), positions, buffer_len, rows)
        row = advance.table[0].tolist()
        live = {(row[READ_ROW] + j) % rows for j in range(row[VALID])}
        written = {(row[WRITE_ROW] + i) % rows for i in range(row[LENGTH])}
        assert 0 <= row[VALID] <= buffer_len
        assert not live & written
        assert row[FLUSH] == (row[VALID] + length > buffer_len)
        checkpoint, end = advance.positions[0].tolist()
        assert checkpoint == (int(history) if row[FLUSH] else int(history) - row[VALID])
        assert end == int(history) + length
        positions, history = advance.positions, history + data.draw(st.integers(1, length))


def test_rejected_drafts_are_counted_once() -> None:
    slots, lengths = torch.tensor([1, -1]), torch.tensor([4, 4])
    positions = torch.tensor([[10, 10], [0, 99]], dtype=torch.int32)
    first = advance_decode(slots, torch.tensor([10, 0]), lengths, positions, 16, 20)
    assert (int(first.appended), int(first.rejected), int(first.flushed)) == (4, 0, 0)
    assert (int(first.windows), int(first.replayed)) == (1, 0)
    second = advance_decode(slots, torch.tensor([12, 0]), lengths, first.positions, 16, 20)
    assert (int(second.rejected), int(second.replayed)) == (2, 2)
    third = advance_decode(slots, torch.tensor([16, 0]), lengths, second.positions, 16, 20)
    assert int(third.rejected) == 0


def test_padding_rows_keep_their_positions_and_name_no_slot() -> None:
    positions = torch.tensor([[3, 5], [7, 9]], dtype=torch.int32)
    advance = advance_decode(torch.tensor([-1, 4]), torch.tensor([0, 7]), torch.tensor([1, 1]), positions, 1, 2)
    assert advance.table[:, SLOT].tolist() == [-1, 4]
    assert advance.table[0, FLUSH] == 0
    assert advance.positions.tolist() == [[3, 5], [7, 8]]


def test_a_prefill_without_history_names_no_slot() -> None:
    positions = torch.tensor([[3, 5], [30, 33]], dtype=torch.int32)
    table = read_prefill(torch.tensor([2, 3]), torch.tensor([0, 32]), positions, 20)
    assert table[:, SLOT].tolist() == [-1, 3]
    assert table[:, VALID].tolist() == [0, 2]
    assert table[1, READ_ROW] == 10
