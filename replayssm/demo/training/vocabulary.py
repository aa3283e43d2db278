"""The tokenizer of the demo model: byte-level BPE learnt from its corpus, with the markers of all demo models."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from replayssm.demo.tokenizer import SPECIAL_TOKENS, with_chat_markers


def learn(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of at most `vocab_size` tokens, special ones included; any text survives it.

    Raises:
        ValueError: `vocab_size` leaves no room for the 256 bytes and the special tokens.
    """
    least = 256 + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ValueError(f'vocab_size: expected at least {least}, got {vocab_size}')
    tokenizer = Tokenizer(models.BPE())
    # Digits one by one make numbers of any length alike, for counting and sums.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return with_chat_markers(tokenizer)


def bytes_per_token(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the bytes of text that each token id stands for, 0 for special tokens."""
    special = set(tokenizer.all_special_tokens) | set(SPECIAL_TOKENS)
    # A byte-level token has one character per byte.
    return [
        0 if token in special else len(token) for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    ]
