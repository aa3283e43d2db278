"""Failures that clients see, with their HTTP status."""

from __future__ import annotations

from http import HTTPStatus

from lmdeploy.messages import ResponseType
from lmdeploy.serve.core import AsyncEngine
from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

from actors.messages import Refusal, RefusalReason

_STATUS: dict[RefusalReason, HTTPStatus] = {
    'queue_full': HTTPStatus.TOO_MANY_REQUESTS,
    'displaced': HTTPStatus.TOO_MANY_REQUESTS,
    'too_many_tokens': HTTPStatus.TOO_MANY_REQUESTS,
    'loading': HTTPStatus.SERVICE_UNAVAILABLE,
    'no_worker': HTTPStatus.SERVICE_UNAVAILABLE,
    'deadline': HTTPStatus.GATEWAY_TIMEOUT,
}

_REQUEST_FAULTS = {'INPUT_LENGTH_ERROR', 'NOT_SUPPORTED', 'PREFIX_CACHE_CONFLICT', 'SESSION_REPEAT'}


class ServiceError(RequestError):
    """A `RequestError` whose status LMDeploy has no code for, or that says when to try again.

    Attributes:
        status_code: HTTP status.
        retry_after_s: Whole seconds for the Retry-After header, or None.
    """

    def __init__(self, status: HTTPStatus, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(ErrorCode.ENGINE_UNAVAILABLE, message)
        self.status_code = status
        self.retry_after_s = retry_after_s


def refused(refusal: Refusal) -> ServiceError:
    """Return the error for a request that was not admitted."""
    return ServiceError(_STATUS[refusal.reason], refusal.message, refusal.retry_after_s)


def is_engine_failure(name: str | None) -> bool:
    """Tell whether a response type means that the engine, not the request, is at fault."""
    return name not in _REQUEST_FAULTS


def engine_error(name: str | None) -> RequestError:
    """Return the error for a request that the engine ended, by the name of LMDeploy's response type."""
    if name in ResponseType.__members__:
        return AsyncEngine._request_error_from_status(ResponseType[name])
    return RequestError(ErrorCode.INTERNAL_ERROR, f'The engine failed: {name}.')
