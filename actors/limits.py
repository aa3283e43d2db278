"""How large a request may be."""

from __future__ import annotations

from http import HTTPStatus

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.error_form import error_body


class SizeLimits:
    """Refuse requests with too large headers (431) or bodies (413), and read the others whole before they are handled.

    All routes need their whole body, and only here a body without a length can still be answered with a status.

    Args:
        app: The application behind it.
        max_body_bytes: Of a body, whether or not its length was announced.
        max_header_bytes: Of names and values together.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_header_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        if scope['type'] != 'http':
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if sum(len(name) + len(value) for name, value in headers.raw) > self._max_header_bytes:
            message = f'The headers are larger than {self._max_header_bytes} bytes.'
            await _refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message, scope, receive, send)
            return
        announced = headers.get('content-length', '')
        body = None
        if not announced.isdecimal() or int(announced) <= self._max_body_bytes:
            body = await self._read(receive)
        if body is None:
            message = f'The body is larger than {self._max_body_bytes} bytes.'
            await _refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, scope, receive, send)
            return
        await self._app(scope, _Replay(body, receive), send)

    async def _read(self, receive: Receive) -> list[Message] | None:
        """Return the messages of a body, which a client that hangs up may cut short; None when it is too large."""
        messages: list[Message] = []
        size = 0
        while True:
            message = await receive()
            messages.append(message)
            size += len(message.get('body', b''))
            if size > self._max_body_bytes:
                return None
            if message['type'] == 'http.disconnect' or not message.get('more_body', False):
                return messages


class _Replay:
    """Gives messages that were taken before, then those that still come."""

    def __init__(self, messages: list[Message], receive: Receive) -> None:
        self._messages = messages[::-1]
        self._receive = receive

    async def __call__(self) -> Message:
        return self._messages.pop() if self._messages else await self._receive()


async def _refuse(status: HTTPStatus, message: str, scope: Scope, receive: Receive, send: Send) -> None:
    # What is left of the request is not worth reading.
    headers = {'connection': 'close'}
    await JSONResponse(error_body(status, message), status, headers)(scope, receive, send)
