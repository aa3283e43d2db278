"""What one request has generated, over all the workers that ran it, and how another one goes on; pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from actors.messages import TokenEvent

if TYPE_CHECKING:
    from lmdeploy.messages import GenerationConfig


class Generation:
    """A prompt and the tokens delivered so far.

    A worker that takes over is given both as its prompt. Its limits are what is left of them. Sampling depends on the
    seed and the position alone, so that it goes on as it would have gone on elsewhere.

    Args:
        input_ids: The prompt.
        gen_config: As the client asked for it, all defaults resolved, `max_new_tokens` among them.
    """

    def __init__(self, input_ids: list[int], gen_config: GenerationConfig) -> None:
        self._input_ids = input_ids
        self._gen_config = gen_config
        self._output_ids: list[int] = []

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._input_ids)

    @property
    def delivered(self) -> int:
        """Tokens generated so far."""
        return len(self._output_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return int(self._gen_config.max_new_tokens) - self.delivered

    @property
    def input_ids(self) -> list[int]:
        """The prompt for the worker that goes on."""
        return self._input_ids + self._output_ids

    @property
    def gen_config(self) -> GenerationConfig:
        """The options for the worker that goes on."""
        return replace(
            self._gen_config,
            max_new_tokens=self.remaining,
            min_new_tokens=self._gen_config.min_new_tokens and max(self._gen_config.min_new_tokens - self.delivered, 0),
        )

    def take(self, event: TokenEvent) -> None:
        """Add a worker's tokens."""
        self._output_ids += event.token_ids

    def kept(self, output_tokens: int) -> list[int]:
        """Return the prompt and the first output tokens."""
        return self._input_ids + self._output_ids[:output_tokens]

    def obstacle(self) -> str | None:
        """Return what makes it impossible to go on elsewhere, by the option's name; None if nothing does.

        These options look at what has been generated since the prompt, which another worker cannot tell from the
        prompt. Before the first token there is nothing to tell apart.
        """
        if not self._output_ids:
            return None
        options = self._gen_config
        if options.response_format is not None:
            return 'response_format'
        if options.repetition_penalty not in (None, 1.0):
            return 'repetition_penalty'
        if options.repetition_ngram_size:
            return 'repetition_ngram_size'
        if options.logits_processors:
            return 'logits_processors'
        return None
