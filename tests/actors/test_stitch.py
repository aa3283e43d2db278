"""Prompts that continue a session begin with the tokens that the engine has seen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmdeploy.tokenizer import Tokenizer

from actors.stitch import shared_length, stitch
from replayssm import demo


@pytest.fixture(scope='module')
def tokenizer() -> Tokenizer:
    return Tokenizer(str(demo.ensure('tiny')))


class Pieces:
    """A tokenizer with pieces of one, two and three characters; the longest match encodes."""

    PIECES = ('a', 'b', 'c', 'ab', 'bc', 'abc')

    def decode(self, token_ids: list[int]) -> str:
        return ''.join(self.PIECES[index] for index in token_ids)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            piece = max((piece for piece in self.PIECES if text.startswith(piece)), key=len)
            ids.append(self.PIECES.index(piece))
            text = text[len(piece) :]
        return ids


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_the_length_of_what_two_sequences_share(first: list[int], second: list[int]) -> None:
    length = shared_length(first, second)
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]


@given(st.lists(st.integers(0, 5), max_size=12), st.text('abc', max_size=8), st.integers(0, 12))
def test_the_text_is_the_same_and_the_history_goes_as_far_as_it_can(history: list[int], tail: str, cut: int) -> None:
    pieces = Pieces()
    text = pieces.decode(history)[: max(cut, 0)] + tail
    plain = pieces.encode(text)
    stitched = stitch(text, plain, history, pieces.decode, pieces.encode)
    assert pieces.decode(stitched) == text
    most = max(n for n in range(len(history) + 1) if text.startswith(pieces.decode(history[:n])))
    assert shared_length(stitched, history) >= most


def continued(tokenizer: Tokenizer, text: str, history: list[int]) -> list[int]:
    """Stitch a text with a real tokenizer."""

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))

    return stitch(text, encode(tokenizer, text), history, decode, lambda piece: encode(tokenizer, piece))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_bos=False))


def test_a_history_goes_on_with_the_rest_of_the_text(tokenizer: Tokenizer) -> None:
    text = 'the quick brown fox'
    spelt = [token for character in text for token in encode(tokenizer, character)]
    stitched = continued(tokenizer, text + ' jumps', spelt)
    assert stitched[: len(spelt)] == spelt
    assert tokenizer.decode(stitched, skip_special_tokens=False) == text + ' jumps'


def test_the_usual_spelling_is_left_as_it_is(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, 'the quick brown fox')
    assert continued(tokenizer, 'the quick brown fox', ids) == ids


def test_a_history_that_ends_inside_a_character_is_cut_before_it(tokenizer: Tokenizer) -> None:
    history = encode(tokenizer, 'ab😀')
    assert len(history) > 3, 'one token per byte'
    assert continued(tokenizer, 'abc', history[:-1]) == encode(tokenizer, 'abc')
