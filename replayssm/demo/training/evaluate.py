"""What the exported checkpoint is worth, measured with transformers: bits per byte and samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForImageTextToText, AutoTokenizer

from replayssm.demo.tokenizer import END_OF_TEXT, END_OF_TURN
from replayssm.demo.training.batches import Stream, document_texts, encode
from replayssm.demo.training.corpus import Document
from replayssm.demo.training.trainee import Trainee
from replayssm.demo.training.vocabulary import bytes_per_token

COMPLETIONS = (
    'It is a truth universally acknowledged, that',
    'And it came to pass in those days, that',
    'def read_json(path):\n    """',
    'class Stack:\n    """',
    'To open a file for reading, call',
)
QUESTIONS = (
    'Hello',
    'Who are you?',
    'What does "river" mean?',
    'What does os.path.join do?',
    'Count from 3 to 9.',
    'What is 7 + 5?',
    'Continue the story: She looked out of the window, and saw a carriage at the door.',
)
_SAMPLE_TOKENS = 96
_ROWS = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and what the model made of it, greedily."""

    prompt: str
    text: str
    ended: bool


def _beginnings(stream: Stream, length: int, max_tokens: int) -> torch.Tensor:
    """Return int64 [windows], spread evenly over the stream."""
    count = max(1, min(stream.tokens.numel(), max_tokens) // length)
    return torch.linspace(0, max(0, stream.tokens.numel() - length), count, device=stream.tokens.device).long()


class Evaluation:
    """An exported checkpoint on a device, in bfloat16 on a GPU and float32 on a CPU."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        dtype = torch.float32 if device == 'cpu' else torch.bfloat16
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).to(device).eval()

    @torch.inference_mode()
    def draft_agreement(self, documents: Sequence[Document], length: int, max_tokens: int) -> list[float]:
        """Return the share of each draft that is the target's first choice, on windows of documents."""
        trainee = Trainee.load(self.folder).to(self.device).eval()
        stream = encode(self.tokenizer, document_texts(documents), self.device)
        shares = []
        for rows in _beginnings(stream, length, max_tokens).split(_ROWS):
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == 'cuda'):
                shares.append(trainee(stream.windows(rows, length)).agreement)
        means: list[float] = torch.stack(shares).mean(0).tolist()
        return means

    @torch.inference_mode()
    def bits_per_byte(self, documents: Sequence[Document], length: int, max_tokens: int) -> dict[str, float]:
        """Return bits per UTF-8 byte of each kind of document and of all, from windows of `length` tokens.

        Args:
            max_tokens: of each kind; what is beyond is left out.
        """
        by_kind: dict[str, list[Document]] = defaultdict(list)
        for document in documents:
            by_kind[document.kind].append(document)
        sizes = torch.tensor(bytes_per_token(self.tokenizer), device=self.device)
        bits, measured = {}, {}
        for kind, own in by_kind.items():
            stream = encode(self.tokenizer, document_texts(own), self.device)
            bits[kind], measured[kind] = self._bits(stream, sizes, length, max_tokens)
        rates = {kind: bits[kind] / measured[kind] for kind in bits}
        return {**rates, 'all': sum(bits.values()) / sum(measured.values())}

    def _bits(self, stream: Stream, sizes: torch.Tensor, length: int, max_tokens: int) -> tuple[float, int]:
        """Return the bits that the stream's tokens cost, and the bytes that they stand for."""
        bits, measured = 0.0, 0
        for rows in _beginnings(stream, length, max_tokens).split(_ROWS):
            tokens = stream.windows(rows, min(length, stream.tokens.numel()))
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
            wanted = tokens[:, 1:]
            nats = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction='sum')
            bits += nats.item() / math.log(2)
            measured += int(sizes[wanted].sum())
        return bits, measured

    def samples(self) -> list[Sample]:
        """Return greedy answers to `COMPLETIONS` and, through the chat template, to `QUESTIONS`."""
        chats = [
            self.tokenizer.apply_chat_template(
                [{'role': 'user', 'content': question}], add_generation_prompt=True, tokenize=False
            )
            for question in QUESTIONS
        ]
        prompts = zip((*COMPLETIONS, *QUESTIONS), (*COMPLETIONS, *chats), strict=True)
        return [self._sample(shown, prompt) for shown, prompt in prompts]

    @torch.inference_mode()
    def _sample(self, shown: str, prompt: str) -> Sample:
        tokens = self.tokenizer(prompt, return_tensors='pt').input_ids.to(self.device)
        ends = [self.tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TURN, END_OF_TEXT)]
        output = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=_SAMPLE_TOKENS,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        answer = output[0, tokens.size(1) :]
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        return Sample(shown, text, int(answer[-1]) in ends)
