"""Stop strings and detokenisation: no text depends on how tokens were cut into events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmdeploy.messages import GenerationConfig
from lmdeploy.tokenizer import Tokenizer

from actors.messages import TokenEvent
from actors.stop_strings import StopStrings
from actors.text import TextStream
from replayssm import demo

ALPHABET = 'abx'


def run(pieces: list[str], strings: list[str], keep: bool = False) -> tuple[str, bool]:
    stop = StopStrings(strings, keep)
    text = ''
    for piece in pieces:
        cut = stop.feed(piece)
        text += cut.text
        if cut.stopped:
            return text, True
    return text + stop.flush(), False


@pytest.mark.parametrize(
    ('text', 'strings', 'keep', 'expected'),
    [
        pytest.param('one STOP two', ['STOP'], False, ('one ', True), id='cut'),
        pytest.param('one STOP two', ['STOP'], True, ('one STOP', True), id='kept'),
        pytest.param('one STO', ['STOP'], False, ('one STO', False), id='unfinished'),
        pytest.param('STSTOP', ['STOP'], False, ('ST', True), id='false-start'),
        pytest.param('aab', ['ab', 'b'], False, ('a', True), id='longest-of-one-end'),
        pytest.param('xaby', ['aby', 'b'], False, ('xa', True), id='first-complete'),
        pytest.param('naïve é', ['é'], False, ('naïve ', True), id='multi-byte'),
        pytest.param('abc', ['', 'c'], False, ('ab', True), id='empty-string'),
        pytest.param('abc', [], False, ('abc', False), id='none'),
    ],
)
def test_stop_strings(text: str, strings: list[str], keep: bool, expected: tuple[str, bool]) -> None:
    assert run([text], strings, keep) == expected
    assert run(list(text), strings, keep) == expected


@given(
    st.lists(st.text(ALPHABET, max_size=4), max_size=8),
    st.lists(st.text(ALPHABET, min_size=1, max_size=3), max_size=3),
    st.booleans(),
)
def test_pieces_do_not_matter(pieces: list[str], strings: list[str], keep: bool) -> None:
    text = ''.join(pieces)
    assert run(pieces, strings, keep) == run(list(text), strings, keep)
    shown, stopped = run(pieces, strings, keep)
    if not keep:
        assert not any(string in shown for string in strings)
    assert stopped or shown == text


@pytest.fixture(scope='module')
def tokenizer() -> Tokenizer:
    return Tokenizer(str(demo.ensure('tiny')))


def feed(tokenizer: Tokenizer, events: list[list[int]], **options: object) -> tuple[str, list[int], str | None]:
    """Return text, token ids and finish reason of token ids in events."""
    prompt = tokenizer.encode('prompt', add_bos=False)
    stream = TextStream(tokenizer, prompt, GenerationConfig(**options))
    text, token_ids = '', list[int]()
    for number, event in enumerate(events):
        reason = 'length' if number == len(events) - 1 else None
        delta = stream.feed(TokenEvent(event, finish_reason=reason))
        text += delta.text
        token_ids += delta.token_ids
        if delta.finish_reason is not None:
            return text, token_ids, delta.finish_reason
    return text, token_ids, None


@pytest.mark.parametrize('text', ['plain ascii', 'naïve café', '漢字かな交じり', '🙂🙃 emoji'], ids=ascii)
@pytest.mark.parametrize('size', [1, 2, 3, 100])
def test_events_of_any_size_decode_to_the_same_text(tokenizer: Tokenizer, text: str, size: int) -> None:
    token_ids = tokenizer.encode(text, add_bos=False)
    events = [token_ids[at : at + size] for at in range(0, len(token_ids), size)]
    assert feed(tokenizer, events) == (text, token_ids, 'length')


@pytest.mark.parametrize('size', [1, 2, 3, 100])
@pytest.mark.parametrize('stop', ['字か', '🙂', 'x漢'], ids=ascii)
def test_a_stop_string_of_many_bytes_is_never_shown(tokenizer: Tokenizer, stop: str, size: int) -> None:
    text = '漢字かな🙂x漢y'
    token_ids = tokenizer.encode(text, add_bos=False)
    events = [token_ids[at : at + size] for at in range(0, len(token_ids), size)]
    shown, used, reason = feed(tokenizer, events, stop_words=[stop])
    before = text[: text.index(stop)]
    assert (shown, reason) == (before, 'stop')
    assert used == tokenizer.encode(before + stop, add_bos=False), 'tokens are counted up to the stop string'


def test_an_unfinished_character_is_not_shown(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode('aé', add_bos=False)
    assert feed(tokenizer, [token_ids[:-1]])[0] == 'a'


def test_logprobs_end_with_the_stop_string(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode('abcdef', add_bos=False)
    stream = TextStream(tokenizer, [1], GenerationConfig(stop_words=['cd']))
    delta = stream.feed(TokenEvent(token_ids, [{token_id: -1.0} for token_id in token_ids]))
    assert (delta.text, len(delta.token_ids), len(delta.logprobs or ())) == ('ab', 4, 4)
