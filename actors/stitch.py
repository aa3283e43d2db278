"""The tokens of a prompt that continues a session: those the engine has seen, as far as the text is the same; pure.

A client sends text. Encoded again, an answer can become other tokens than the ones that were generated: an answer cut
at a token limit, or a word that the model spelt in an unusual way. The model would then continue another history than
the one it has produced, and no state computed for it could be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], list[int]]


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two sequences of one type."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def stitch(text: str, token_ids: list[int], history: list[int], decode: Decode, encode: Encode) -> list[int]:
    """Return tokens of a prompt that begin with as many tokens of a history as the prompt's text allows.

    Args:
        text: The prompt.
        token_ids: The prompt, encoded as a whole; returned as they are unless the history goes further.
        history: Tokens of a session.
        decode: Tokens to text, special tokens included.
        encode: Text to tokens, nothing added.
    """
    kept = _prefix_within(text, history, decode)
    if kept <= shared_length(token_ids, history):
        return token_ids
    begin = decode(history[:kept])
    stitched = [*history[:kept], *encode(text[len(begin) :])]
    # A tokenizer whose pieces do not simply add up gets its own way.
    return stitched if decode(stitched) == text else token_ids


def _prefix_within(text: str, history: list[int], decode: Decode) -> int:
    """Return how many tokens of `history` decode to a prefix of `text`."""
    shared = shared_length(text, decode(history))
    low, high = 0, len(history)
    while low < high:
        middle = (low + high + 1) // 2
        if len(decode(history[:middle])) <= shared:
            low = middle
        else:
            high = middle - 1
    # A token that ends inside a character decodes to something else than the text has there.
    while low and not text.startswith(decode(history[:low])):
        low -= 1
    return low
