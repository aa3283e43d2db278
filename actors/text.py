"""From token events to text: incremental detokenisation and stop strings."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmdeploy.tokenizer import DetokenizeState, Tokenizer

from actors.messages import FinishReason, TokenEvent
from actors.stop_strings import StopStrings

if TYPE_CHECKING:
    from lmdeploy.messages import GenerationConfig

_CONTEXT_TOKENS = 8
"""Prompt tokens that the first generated ones are decoded after; more would only cost time."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one token event adds to the output; texts of all deltas make the whole text, whatever the events were."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: FinishReason | None


class TextStream:
    """Decodes one request's tokens. Bytes of an unfinished character and of a possible stop string wait.

    Args:
        tokenizer: LMDeploy's.
        input_ids: The prompt.
        gen_config: `stop_words`, and how to treat special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, input_ids: list[int], gen_config: GenerationConfig) -> None:
        self._tokenizer = tokenizer
        self._options: dict[str, Any] = {
            'skip_special_tokens': gen_config.skip_special_tokens,
            'spaces_between_special_tokens': gen_config.spaces_between_special_tokens,
        }
        self._stop = StopStrings(gen_config.stop_words or (), keep=gen_config.include_stop_str_in_output)
        self._context = input_ids[-_CONTEXT_TOKENS:]
        self._state = DetokenizeState(len(self._context))
        self._length = 0
        self._shown = 0
        self._ends: list[int] = []

    def feed(self, event: TokenEvent) -> TextDelta:
        """Decode an event. A finish reason of 'stop' that the event lacks means that a stop string is complete."""
        text = ''
        # Token by token, so that neither the text nor the count of tokens depends on how they were batched.
        for used, token_id in enumerate(event.token_ids, start=1):
            piece = self._decode(token_id)
            self._length += len(piece)
            self._ends.append(self._length)
            cut = self._stop.feed(piece)
            text += cut.text
            if cut.stopped:
                self._shown += len(text)
                return TextDelta(text, event.token_ids[:used], event.logprobs and event.logprobs[:used], 'stop')
        if event.finish_reason is not None:
            text += self._stop.flush()
        self._shown += len(text)
        return TextDelta(text, event.token_ids, event.logprobs, event.finish_reason)

    @property
    def shown_tokens(self) -> int:
        """Leading tokens whose whole text has been returned: neither held back nor cut off by a stop string."""
        return bisect.bisect_right(self._ends, self._shown)

    def _decode(self, token_id: int) -> str:
        """Return the text that a token completes."""
        text, state = self._tokenizer.detokenize_incrementally([*self._context, token_id], self._state, **self._options)
        # Only tokens whose text may still change are needed again; all of them would make every token dearer.
        self._context = []
        state.ids_offset = 0
        if state.prev_tokens is not None:
            state.prev_tokens = state.prev_tokens[state.prefix_offset :]
            state.read_offset -= state.prefix_offset
            state.prefix_offset = 0
        self._state = state
        return str(text)
