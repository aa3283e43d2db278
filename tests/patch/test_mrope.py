"""Token ids and mrope positions of a sequence, turn after turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lmdeploy.pytorch.multimodal.data_type import MultiModalData
from lmdeploy.pytorch.paging.scheduler import Scheduler
from lmdeploy.vl.constants import Modality

from replayssm.patch import mrope
from tests.patch.scheduling import (
    STOCK_AND_FIXED,
    add_sequence,
    admit,
    continue_sequence,
    decode_output,
    installed,
    make_scheduler,
    prefill_output,
)

PROMPT = 12
NEW_INPUT = (901, 902, 903)


def start(num_accepted: int = 2, scheduler: Scheduler | None = None) -> Any:
    """Return a sequence with drafts: the prompt, token 500, then `num_accepted` tokens from 501 on."""
    scheduler = scheduler or make_scheduler(spec=True, use_mrope=True)
    seq = add_sequence(scheduler, PROMPT)
    admit(scheduler)
    prefill_output(seq, 500)
    decode_output(seq, range(501, 501 + num_accepted))
    return seq


def assert_aligned(seq: Any, expected: list[int]) -> None:
    """Text only: the position of a token is its index."""
    assert seq.valid_ids.tolist() == expected
    first = int(seq.num_history_ids)
    assert seq.token_ids[: len(expected) - first].tolist() == expected[first:]
    assert seq.mrope_pos_ids.shape == (len(seq.token_ids), 3)
    assert (seq.mrope_pos_ids == np.arange(first, first + len(seq.token_ids))[:, None]).all()


@STOCK_AND_FIXED
@pytest.mark.parametrize('stop_pos', [0, 1, 2, 3])
def test_input_after_a_stop_in_mid_acceptance(stop_pos: int, fixed: bool) -> None:
    with installed(mrope, when=fixed):
        seq = start()
        decode_output(seq, [601, 602, 603, 604], stop_pos=stop_pos)
        continue_sequence(seq, NEW_INPUT)
        expected = [*range(PROMPT), 500, 501, 502, *[601, 602, 603, 604][: stop_pos + 1], *NEW_INPUT]
        if not fixed:
            assert seq.token_ids.tolist() == expected[seq.num_history_ids : -1], 'the last input token is lost'
            return
        assert_aligned(seq, expected)
        seq.set_step(0)
        assert_aligned(seq, expected)
        prefill_output(seq, 700)
        assert_aligned(seq, [*expected, 700])
        decode_output(seq, [701, 702])
        assert_aligned(seq, [*expected, 700, 701, 702])


@STOCK_AND_FIXED
def test_input_after_an_abort_follows_the_accepted_tokens(fixed: bool) -> None:
    """The drafts of the step in flight are not part of the history."""
    with installed(mrope, when=fixed):
        seq = start()
        seq.state.stop()
        continue_sequence(seq, NEW_INPUT)
        expected = [*range(PROMPT), 500, 501, 502, *NEW_INPUT]
        if not fixed:
            assert seq.valid_ids.tolist() == [*range(PROMPT), 500, 501, 502, -1, -1, -1]
            return
        assert_aligned(seq, expected)


@STOCK_AND_FIXED
@pytest.mark.parametrize('stop_pos', [0, 1, 2, 3])
def test_recomputation_after_a_stop(stop_pos: int, fixed: bool) -> None:
    """Without the fix there are fewer rows than tokens, and a prefill cannot be assembled."""
    with installed(mrope, when=fixed):
        seq = start(num_accepted=4)
        decode_output(seq, [601, 602, 603, 604], stop_pos=stop_pos)
        continue_sequence(seq, range(900, 910))
        seq.set_step(0)
        num_tokens, num_rows = len(seq.token_ids), len(seq.mrope_pos_ids)
    assert num_tokens == PROMPT + 5 + stop_pos + 1 + 10
    assert num_rows == num_tokens - (0 if fixed else 1)


@STOCK_AND_FIXED
def test_two_turns_in_a_row(fixed: bool) -> None:
    with installed(mrope, when=fixed):
        scheduler = make_scheduler(spec=True, use_mrope=True)
        seq = start(scheduler=scheduler)
        expected = [*range(PROMPT), 500, 501, 502]
        for turn in range(3):
            decode_output(seq, [600 + turn, 610 + turn, 620 + turn], stop_pos=1)
            continue_sequence(seq, NEW_INPUT)
            seq.set_step(0)
            expected += [600 + turn, 610 + turn, *NEW_INPUT]
            aligned = len(seq.mrope_pos_ids) == len(seq.token_ids)
            assert aligned is fixed
            if not fixed:
                return
            assert_aligned(seq, expected)
            assert admit(scheduler) == [seq]
            prefill_output(seq, 700 + turn)
            expected.append(700 + turn)


def image(start_index: int, height: int, width: int) -> MultiModalData:
    """An image of height x width tokens, at a token index relative to its own input."""
    rows, columns = np.divmod(np.arange(height * width), width)
    positions = np.stack([np.zeros_like(rows), rows, columns], axis=-1)
    return MultiModalData(
        modality=Modality.IMAGE,
        data=np.zeros(1),
        start=start_index,
        end=start_index + height * width,
        mrope_pos_ids=positions,
    )


def positions_token_by_token(kinds: list[tuple[int, int] | None]) -> np.ndarray:
    """The rule itself: text advances by one; an image of h x w spans max(h, w) positions."""
    rows: list[list[int]] = []
    position = 0
    for kind in kinds:
        if kind is None:
            rows.append([position] * 3)
            position += 1
            continue
        height, width = kind
        rows += [[position, position + i, position + j] for i in range(height) for j in range(width)]
        position += max(height, width)
    return np.array(rows)


@STOCK_AND_FIXED
@pytest.mark.parametrize('spec', [False, True], ids=['plain', 'mtp3'])
def test_an_image_in_a_later_turn(spec: bool, fixed: bool) -> None:
    with installed(mrope, when=fixed):
        scheduler = make_scheduler(spec=spec, use_mrope=True)
        session = scheduler.add_session(0)
        seq = session.add_sequence(np.arange(10), multimodals={'mm': [image(2, 2, 2)]})
        first_turn = [None] * 2 + [(2, 2)] + [None] * 4
        assert (seq.history_mrope_pos_ids.get_real() == positions_token_by_token(first_turn)).all()
        admit(scheduler)
        prefill_output(seq, 500)
        decode_output(seq, [501], stop_pos=0)
        continue_sequence(seq, range(20, 40), multimodals={'mm': [image(3, 3, 3), image(14, 2, 2)]})
        second_turn = [None] * 3 + [(3, 3)] + [None] * 2 + [(2, 2)] + [None] * 2
        expected = positions_token_by_token([*first_turn, None, None, *second_turn])
        rows = seq.history_mrope_pos_ids.get_real()
    if not fixed:
        assert rows.shape != expected.shape or (rows != expected).any()
        return
    assert rows.shape == expected.shape
    assert (rows == expected).all()


def test_text_between_two_kinds_of_input() -> None:
    """Images and videos of one turn are placed by their index, whatever order they came in."""
    with installed(mrope):
        scheduler = make_scheduler(use_mrope=True)
        session = scheduler.add_session(0)
        video = image(9, 2, 2)
        video.modality = Modality.VIDEO
        seq = session.add_sequence(np.arange(16), multimodals={'video': [video], 'image': [image(1, 2, 3)]})
    expected = positions_token_by_token([None, (2, 3), None, None, (2, 2), None, None, None])
    assert (seq.history_mrope_pos_ids.get_real() == expected).all()


@pytest.mark.parametrize('first_turn', [[None] * 5, [None, (2, 2), None, (3, 1), None]], ids=['text', 'images'])
def test_the_first_turn_is_as_before(first_turn: list[tuple[int, int] | None]) -> None:
    images, num_tokens = [], 0
    for kind in first_turn:
        if kind is not None:
            images.append(image(num_tokens, *kind))
        num_tokens += 1 if kind is None else kind[0] * kind[1]
    for fixed in (False, True):
        with installed(mrope, when=fixed):
            session = make_scheduler(use_mrope=True).add_session(0)
            seq = session.add_sequence(np.arange(num_tokens), multimodals={'mm': images} if images else None)
        assert (seq.history_mrope_pos_ids.get_real() == positions_token_by_token(first_turn)).all()
