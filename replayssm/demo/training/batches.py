"""Tokens on the training device, and random windows of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from replayssm.demo.tokenizer import END_OF_TEXT
from replayssm.demo.training.corpus import Document
from replayssm.demo.training.dialogues import Dialogue

_DIALOGUE_SHARE = 0.2
_ENCODED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Stream:
    """Texts one behind the other.

    Attributes:
        tokens: int32 [tokens].
        starts: int64 [texts], where each text begins.
    """

    tokens: torch.Tensor
    starts: torch.Tensor

    def windows(self, first: torch.Tensor, length: int) -> torch.Tensor:
        """Return int64 [rows, length], the windows that begin at `first` [rows]."""
        offsets = torch.arange(length, device=self.tokens.device)
        return self.tokens[(first[:, None] + offsets) % self.tokens.numel()].long()


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], device: str) -> Stream:
    """Return the tokens of all `texts` as one stream on `device`."""
    pieces, starts, total = [], [], 0
    for begin in range(0, len(texts), _ENCODED_AT_ONCE):
        for ids in tokenizer(list(texts[begin : begin + _ENCODED_AT_ONCE])).input_ids:
            pieces.append(torch.tensor(ids, dtype=torch.int32))
            starts.append(total)
            total += len(ids)
    return Stream(torch.cat(pieces).to(device), torch.tensor(starts, device=device))


def document_texts(documents: Iterable[Document]) -> list[str]:
    """Return the texts as the model reads them, each with its end."""
    return [document.text + END_OF_TEXT for document in documents]


def dialogue_texts(tokenizer: PreTrainedTokenizerFast, dialogues: Iterable[Dialogue]) -> list[str]:
    """Return the dialogues as the chat template writes them."""
    return [tokenizer.apply_chat_template(dialogue.messages, tokenize=False) for dialogue in dialogues]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws training batches: most rows from anywhere in the documents, the rest from the beginning of a dialogue."""

    documents: Stream
    dialogues: Stream
    rows: int
    length: int
    generator: torch.Generator

    def batch(self) -> torch.Tensor:
        """Return int64 [rows, length] tokens."""
        chats = round(self.rows * _DIALOGUE_SHARE)
        anywhere = self._random(self.documents.tokens.numel(), self.rows - chats)
        beginnings = self.dialogues.starts[self._random(self.dialogues.starts.numel(), chats)]
        return torch.cat(
            (self.documents.windows(anywhere, self.length), self.dialogues.windows(beginnings, self.length))
        )

    def _random(self, high: int, count: int) -> torch.Tensor:
        device = self.documents.tokens.device
        return torch.randint(high, (count,), generator=self.generator, device=device)
