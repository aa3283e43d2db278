"""Bodies of errors, as OpenAI and Anthropic send them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from lmdeploy.serve.core.exceptions import RequestError
from starlette.exceptions import HTTPException

from actors.errors import ServiceError

_TYPES = {
    HTTPStatus.BAD_REQUEST: 'invalid_request_error',
    HTTPStatus.UNAUTHORIZED: 'authentication_error',
    HTTPStatus.NOT_FOUND: 'not_found_error',
    HTTPStatus.TOO_MANY_REQUESTS: 'rate_limit_error',
}
_CODES = {
    HTTPStatus.UNAUTHORIZED: 'invalid_api_key',
    HTTPStatus.NOT_FOUND: 'model_not_found',
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: 'request_too_large',
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: 'request_too_large',
    HTTPStatus.TOO_MANY_REQUESTS: 'rate_limit_exceeded',
    HTTPStatus.SERVICE_UNAVAILABLE: 'service_unavailable',
    HTTPStatus.GATEWAY_TIMEOUT: 'deadline_exceeded',
}

_ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: 'authentication_error',
    HTTPStatus.NOT_FOUND: 'not_found_error',
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: 'request_too_large',
    HTTPStatus.TOO_MANY_REQUESTS: 'rate_limit_error',
    HTTPStatus.SERVICE_UNAVAILABLE: 'overloaded_error',
    HTTPStatus.GATEWAY_TIMEOUT: 'timeout_error',
}


def error_body(
    status: int, message: str, error: RequestError | None = None, param: str | None = None
) -> dict[str, Any]:
    """Return the body of an error as OpenAI sends it."""
    code = _CODES.get(HTTPStatus(status))
    if code is None and error is not None and not isinstance(error, ServiceError):
        code = error.code.value
    kind = _TYPES.get(HTTPStatus(status), 'server_error' if status >= 500 else 'invalid_request_error')
    return {'error': {'message': message, 'type': kind, 'param': param, 'code': code}}


def anthropic_error_body(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error as Anthropic sends it."""
    kind = _ANTHROPIC_TYPES.get(HTTPStatus(status), 'api_error' if status >= 500 else 'invalid_request_error')
    return {'type': 'error', 'error': {'type': kind, 'message': message}}


async def http_exception_response(_: Request, error: Exception) -> JSONResponse:
    """Handle a Starlette `HTTPException`: its own errors, such as unknown paths, and those that dependencies raise."""
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(error.status_code, error.detail), error.status_code, error.headers)
