"""What LMDeploy's routes let through although its engine cannot run it: options it drops, numbers it cannot hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from lmdeploy.serve.core.exceptions import ErrorCode, RequestError
from lmdeploy.serve.processors.multimodal import MULTIMODAL_TYPES

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_RANGES: Mapping[str, tuple[float, float]] = {
    'frequency_penalty': (-2, 2),
    'max_completion_tokens': (1, _INT32),
    'max_output_tokens': (1, _INT32),
    'max_tokens': (1, _INT32),
    'min_new_tokens': (0, _INT32),
    'min_p': (0, 1),
    'n': (1, 128),
    'presence_penalty': (-2, 2),
    # Sampling works in float32, where more extreme ones make probabilities that are none.
    'repetition_penalty': (0.01, 100),
    # Of every sequence, the engine keeps a table of this size.
    'repetition_ngram_size': (0, 1024),
    'repetition_ngram_threshold': (0, _INT32),
    'seed': (-_INT64, _INT64),
    'temperature': (0, 2),
    'top_k': (0, _INT32),
    'top_logprobs': (0, 20),
    'top_p': (0, 1),
}
"""Least and greatest value of every number that reaches the engine, whichever API it comes by."""
_BIAS = (-100, 100)
_ENGINES_OWN = ('migration_request', 'with_cache', 'preserve_cache')
"""Orders from one engine to another, which LMDeploy takes from clients too."""
_ELSEWHERE = 'not supported here; /v1/chat/completions has n and logprobs, and one prompt can be streamed'


async def check_body(request: Request) -> None:
    """FastAPI dependency of LMDeploy's routes.

    Raises:
        RequestValidationError: The body has something in it that cannot be done.
    """
    for name, problem in _problems(await json_object(request), request.url.path):
        raise RequestValidationError([{'loc': ('body', name), 'msg': problem, 'type': 'unsupported'}])


async def json_object(request: Request) -> dict[str, Any]:
    """Return the body, empty unless it is a JSON object: FastAPI says what is wrong with others."""
    if request.method != 'POST':
        return {}
    try:
        body = await request.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def check_messages(chat_template: Any) -> None:
    """Have a chat template of LMDeploy's raise ValueError for messages that it has no text for; mutated in place.

    Templates come with the checkpoint and raise whatever they like, which LMDeploy's routes take for a fault of theirs.
    """
    to_prompt = chat_template.messages2prompt

    def to_prompt_or_value_error(messages: Any, *args: Any, **kwargs: Any) -> str:
        try:
            return str(to_prompt(messages, *args, **kwargs))
        except Exception as error:
            raise ValueError(f"The model's chat template does not take these messages: {error}") from error

    chat_template.messages2prompt = to_prompt_or_value_error


def check_text(messages: Any) -> None:
    """Check that a conversation is all text: no worker here has a vision tower.

    Raises:
        RequestError: One of its parts is an image, a video, audio or a time series; the message names the part.
    """
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get('content') if isinstance(message, Mapping) else None
        for place, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get('type') if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind in MULTIMODAL_TYPES:
                raise RequestError(
                    ErrorCode.INVALID_REQUEST,
                    f'messages[{index}].content[{place}].type: got {kind!r}; the model is served as text only, '
                    "leave the part out or describe it in one of type 'text'",
                )


def check_prompt(input_ids: Collection[int], vocab_size: int) -> None:
    """Check the tokens of a prompt, which clients may also give themselves; the wrong ones end the engine.

    Raises:
        RequestError: There are none, or some that the model does not know.
    """
    if not input_ids:
        raise RequestError(ErrorCode.INVALID_REQUEST, 'The prompt has no tokens; give at least one.')
    if min(input_ids) < 0 or max(input_ids) >= vocab_size:
        raise RequestError(ErrorCode.INVALID_REQUEST, f'Token ids of the prompt must be in [0, {vocab_size}).')


def _problems(body: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    for name, (low, high) in _RANGES.items():
        if not _within(body.get(name), low, high):
            yield name, f'expected a number from {low} to {high}, got {body[name]!r}'
    for name in _ENGINES_OWN:
        if body.get(name):
            yield name, 'not supported here'
    bias = body.get('logit_bias')
    if isinstance(bias, dict) and not all(_within(value, *_BIAS) for value in bias.values()):
        yield 'logit_bias', f'expected numbers from {_BIAS[0]} to {_BIAS[1]}'
    if path == '/v1/completions':
        yield from _dropped(body)


def _dropped(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what `/v1/completions` takes and then ignores, or fails on."""
    if body.get('n', 1) is None:
        yield 'n', 'expected a number; leave it out for one choice'
    several = isinstance(body.get('prompt'), list) and len(body['prompt']) > 1
    dropped = {
        'n': body.get('n', 1) not in (None, 1),
        'logprobs': bool(body.get('logprobs')),
        'echo': bool(body.get('echo')),
        'suffix': bool(body.get('suffix')),
        'stream': bool(body.get('stream')) and several,
    }
    yield from ((name, _ELSEWHERE) for name, given in dropped.items() if given)


def _within(value: Any, low: float, high: float) -> bool:
    """Tell whether a value lies in a range; what is no number at all is for LMDeploy's own checks."""
    if isinstance(value, str):
        try:
            value = float(value)  # LMDeploy takes numbers in quotes
        except ValueError:
            return True
    return not isinstance(value, int | float) or low <= value <= high
