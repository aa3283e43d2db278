"""Requests as the tests make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from tests.actors.service.conftest import MODEL


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    logprobs: int = 0


def chat(content: str, max_tokens: int, **options: Any) -> dict[str, Any]:
    """Return the arguments of a chat completion that is greedy and ends at `max_tokens` alone."""
    ignore_eos = options.pop('ignore_eos', True)
    return {
        'model': MODEL,
        'messages': [{'role': 'user', 'content': content}],
        'max_tokens': max_tokens,
        'temperature': 0,
        'extra_body': {'ignore_eos': ignore_eos},
        **options,
    }


async def ask(client: AsyncOpenAI, content: str, max_tokens: int, **options: Any) -> Answer:
    """Return one whole answer."""
    got = await client.chat.completions.create(**chat(content, max_tokens, **options))
    choice = got.choices[0]
    return Answer(
        choice.message.content or '',
        choice.finish_reason,
        got.usage.prompt_tokens,
        got.usage.completion_tokens,
        len(choice.logprobs.content) if choice.logprobs else 0,
    )


async def ask_in_pieces(client: AsyncOpenAI, content: str, max_tokens: int, **options: Any) -> tuple[Answer, list[str]]:
    """Return one streamed answer, put together, and its pieces."""
    stream = await client.chat.completions.create(
        **chat(content, max_tokens, **options), stream=True, stream_options={'include_usage': True}
    )
    pieces: list[str] = []
    reason, usage, logprobs = None, None, 0
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or '')
            reason = choice.finish_reason or reason
            logprobs += len(choice.logprobs.content) if choice.logprobs else 0
    assert usage is not None
    return Answer(''.join(pieces), reason, usage.prompt_tokens, usage.completion_tokens, logprobs), pieces


def prompts(count: int) -> Sequence[str]:
    """Return prompts of different lengths."""
    return [f'{number}: ' + 'tell me more ' * (number % 5) for number in range(count)]
