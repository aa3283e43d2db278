"""What every HTTP request passes through: its scope, OpenAI's form of errors, and no silent ends of streams."""

from __future__ import annotations

import json
import logging
import math
from http import HTTPStatus
from typing import Any, get_args

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.error_form import anthropic_error_body, error_body
from actors.errors import ServiceError
from actors.messages import Priority
from actors.routed_engine import RequestScope, request_scope

logger = logging.getLogger(__name__)

SESSION_HEADER = 'x-session-id'
TIMEOUT_HEADER = 'x-request-timeout-seconds'
PRIORITY_HEADER = 'x-request-priority'
_ANTHROPIC_PREFIXES = ('/v1/messages', '/anthropic/')
_API_PREFIXES = ('/v1/', '/anthropic/')
_TIMEOUT_SHARE = 0.8
"""Part of the client's deadline after which we give up. At the deadline itself Serve's proxy, which reads the same
header, cuts the connection with a 408 in plain text, or in the middle of a stream without a word."""


class RequestScopeMiddleware:
    """Give every HTTP request a `RequestScope`, and close what it opened when it ends or the client has gone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request; probes and documentation pass as they are."""
        if scope['type'] != 'http' or not scope['path'].startswith(_API_PREFIXES):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        current = RequestScope(session=headers.get(SESSION_HEADER) or None)
        token = request_scope.set(current)
        response = _Response(send, current, anthropic=scope['path'].startswith(_ANTHROPIC_PREFIXES))
        try:
            current.timeout_s = _timeout_s(headers)
            current.priority = _priority(headers)
            await self._app(scope, receive, response.send)
        except _BadHeader as error:
            await response.fail(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            logger.exception('%s %s failed', scope['method'], scope['path'])
            await response.fail(HTTPStatus.INTERNAL_SERVER_ERROR, 'An internal server error occurred.')
        finally:
            for stream in current.streams:
                stream.close()
            request_scope.reset(token)


class _BadHeader(ValueError):
    pass


def _timeout_s(headers: Headers) -> float | None:
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not timeout_s > 0:
        raise _BadHeader(f'{TIMEOUT_HEADER}: expected a positive number of seconds, got {text!r}')
    return _TIMEOUT_SHARE * timeout_s


def _priority(headers: Headers) -> Priority:
    text = headers.get(PRIORITY_HEADER, 'normal')
    for priority in get_args(Priority):
        if text == priority:
            return priority
    raise _BadHeader(f'{PRIORITY_HEADER}: expected one of {", ".join(get_args(Priority))}, got {text!r}')


class _Response:
    """Passes a response on; errors wait for their whole body and leave in the form of the API they belong to."""

    def __init__(self, send: Send, current: RequestScope, anthropic: bool) -> None:
        self._send = send
        self._current = current
        self._anthropic = anthropic
        self._start: Message | None = None
        self._is_error = False
        self._is_stream = False
        self._body = b''

    async def send(self, message: Message) -> None:
        """Take one ASGI message of the application."""
        if message['type'] == 'http.response.start':
            self._start = message
            headers = Headers(raw=message['headers'])
            self._is_stream = headers.get('content-type', '').startswith('text/event-stream')
            self._current.streaming = self._is_stream
            self._is_error = message['status'] >= 400
            if not self._is_error:
                await self._send(message)
        elif not self._is_error:
            await self._send(message)
        else:
            self._body += message.get('body', b'')
            if not message.get('more_body', False):
                await self._send_error()

    async def fail(self, status: HTTPStatus, message: str) -> None:
        """End a response whose application raised: with a status if there is none yet, else with an error event."""
        if self._start is None:
            self._start = {'type': 'http.response.start', 'status': status, 'headers': []}
            self._body = message.encode()
            await self._send_error()
        elif self._is_stream:
            event = json.dumps(self._form(status, message, None))
            text = f'event: error\ndata: {event}\n\n' if self._anthropic else f'data: {event}\n\ndata: [DONE]\n\n'
            await self._send({'type': 'http.response.body', 'body': text.encode()})

    async def _send_error(self) -> None:
        assert self._start is not None
        error = self._current.error
        body = json.dumps(self._form(self._start['status'], *_parse(self._start['status'], self._body))).encode()
        headers = MutableHeaders(raw=list(self._start['headers']))
        headers['content-type'] = 'application/json'
        headers['content-length'] = str(len(body))
        if isinstance(error, ServiceError) and error.retry_after_s is not None:
            headers['retry-after'] = str(error.retry_after_s)
        await self._send({**self._start, 'headers': headers.raw})
        await self._send({'type': 'http.response.body', 'body': body})

    def _form(self, status: int, message: str, param: str | None) -> dict[str, Any]:
        if self._anthropic:
            return anthropic_error_body(status, message)
        return error_body(status, message, self._current.error, param)


def _parse(status: int, body: bytes) -> tuple[str, str | None]:
    """Return message and parameter of an error body, be it nested, flat (LMDeploy), `detail` (FastAPI) or text."""
    try:
        data = json.loads(body)
    except ValueError:
        data = body.decode(errors='replace')
    if not isinstance(data, dict):
        data = {'message': str(data)}
    if isinstance(data.get('error'), dict):
        data = data['error']
    message = data.get('message') or data.get('detail') or HTTPStatus(status).phrase
    return str(message), data.get('param')
