"""What the bodies of requests say to the deployment rather than to the model."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError

from actors.request_checks import json_object
from actors.routed_engine import request_scope

_SESSION_FIELDS = ('session_id', 'prompt_cache_key', 'user')
_MAX_SESSION_CHARS = 256


async def name_session(request: Request) -> None:
    """Take the session's name from the body unless a header has given it.

    Raises:
        RequestValidationError: The name is not one.
    """
    scope = request_scope.get()
    if scope.session is None:
        scope.session = session_name(await json_object(request))


async def check_continuation(request: Request) -> None:
    """Refuse to continue a message that is not there; LMDeploy continues one of the assistant whenever it is last.

    Raises:
        RequestValidationError: `continue_final_message` is set, and the last message is not the assistant's.
    """
    body = await json_object(request)
    messages = body.get('messages')
    last = messages[-1] if isinstance(messages, list) and messages else None
    if body.get('continue_final_message') and (not isinstance(last, dict) or last.get('role') != 'assistant'):
        raise _invalid('continue_final_message', "needs a last message of role 'assistant', which the answer continues")


def session_name(body: dict[str, Any]) -> str | None:
    """Return the name that a request gives its session, None if it gives none.

    Raises:
        RequestValidationError: The name is not one.
    """
    metadata = body.get('metadata')
    candidates = {field: body.get(field) for field in _SESSION_FIELDS}
    if isinstance(metadata, dict):
        candidates['metadata.user_id'] = metadata.get('user_id')
    for field, value in candidates.items():
        if value in (None, '', -1):  # LMDeploy's clients send -1 for none
            continue
        if isinstance(value, bool) or not isinstance(value, str | int) or len(str(value)) > _MAX_SESSION_CHARS:
            raise _invalid(field, f'expected a number or at most {_MAX_SESSION_CHARS} characters that name the session')
        return str(value)
    return None


def _invalid(field: str, detail: str) -> RequestValidationError:
    return RequestValidationError([{'loc': ('body', field), 'msg': detail, 'type': 'value_error'}])
