"""Who may call: API keys and the administrators' token, both in files that may change while the service runs."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.config import ApiConfig
from actors.config_error import ConfigError
from actors.error_form import error_body

logger = logging.getLogger(__name__)

ADMIN_PREFIX = '/admin/'
"""Paths that API keys do not open: `RequireAdmin` guards them with a token of their own."""
_CHALLENGE = {'www-authenticate': 'Bearer'}


class TokenFile:
    """The tokens of a file, one per line; blank lines and lines that begin with `#` are left out.

    The file is read again when it changes, also when a symbolic link on its path leads elsewhere, as Kubernetes does
    with mounted secrets. While it cannot be read, the tokens are those of before.

    Args:
        path: The file.
        key: Name of the configuration key, for errors.

    Raises:
        ConfigError: The file cannot be read or holds no token.
    """

    def __init__(self, path: str, key: str) -> None:
        self._path = Path(path)
        self._problem = ''
        try:
            self._read()
        except OSError as error:
            raise ConfigError(f'{key}: got {path!r}; {error.strerror}, name a file with one token per line') from None
        if not self._digests:
            raise ConfigError(f'{key}: got {path!r}; the file holds no token, write one per line')

    def holds(self, candidates: Iterable[bytes]) -> bool:
        """Tell whether one of `candidates` is a token now, in a time that does not depend on which or how nearly."""
        self._refresh()
        found = False
        for candidate in candidates:
            digest = hashlib.sha256(candidate).digest()
            for known in self._digests:
                found |= hmac.compare_digest(digest, known)
        return found

    def _refresh(self) -> None:
        try:
            if _stamp(self._path.stat()) != self._seen:
                self._read()
                logger.warning('%s has changed and holds %d tokens now', self._path, len(self._digests))
            problem = ''
        except OSError as error:
            problem = str(error)
            if problem != self._problem:
                logger.error('the tokens of before stay valid: %s', problem)
        self._problem = problem

    def _read(self) -> None:
        with self._path.open('rb') as file:
            # Taken from the file that is open, before it is read: what changes meanwhile is read again.
            self._seen = _stamp(os.fstat(file.fileno()))
            lines = [line.strip() for line in file]
        self._digests = [hashlib.sha256(line).digest() for line in lines if line and not line.startswith(b'#')]


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def open_api_keys(config: ApiConfig) -> TokenFile | None:
    """Return the API keys, None where everybody may call.

    Raises:
        ConfigError: The file cannot be read or holds no key.
    """
    return TokenFile(config.api_keys_file, 'api.api_keys_file') if config.api_keys_file else None


def open_admin_tokens(config: ApiConfig) -> TokenFile | None:
    """Return the administrators' tokens, None where nobody administers over HTTP.

    Raises:
        ConfigError: The file cannot be read or holds no token.
    """
    return TokenFile(config.admin_token_file, 'api.admin_token_file') if config.admin_token_file else None


class ApiKeyMiddleware:
    """Refuse requests without a valid API key with 401.

    A key comes as `Authorization: Bearer`, or as Anthropic's clients send it in `x-api-key`.

    Args:
        app: The application behind it.
        keys: Valid keys.
        open_paths: Paths that need none, exactly as written.
    """

    def __init__(self, app: ASGIApp, keys: TokenFile, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        if scope['type'] == 'http' and not self._may_pass(scope):
            message = 'A valid API key is required: send it as "Authorization: Bearer <key>" or as "x-api-key: <key>".'
            body = error_body(HTTPStatus.UNAUTHORIZED, message)
            await JSONResponse(body, HTTPStatus.UNAUTHORIZED, _CHALLENGE)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope['path'].removeprefix(scope.get('root_path', ''))
        if path in self._open_paths or path.startswith(ADMIN_PREFIX):
            return True
        headers = Headers(scope=scope)
        return self._keys.holds([*_bearer(headers), *_values(headers, 'x-api-key')])


class RequireAdmin:
    """FastAPI dependency of administrators' routes, whose paths begin with `ADMIN_PREFIX`.

    Without configured tokens these routes do not exist: 404. With a wrong token, or none: 401.
    """

    def __init__(self, tokens: TokenFile | None) -> None:
        self._tokens = tokens

    async def __call__(self, request: Request) -> None:
        """Let an administrator pass.

        Raises:
            HTTPException: It is none.
        """
        if self._tokens is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, 'Not Found')
        if not self._tokens.holds(_bearer(request.headers)):
            message = 'An administrator\'s token is required: send it as "Authorization: Bearer <token>".'
            raise HTTPException(HTTPStatus.UNAUTHORIZED, message, _CHALLENGE)


def _bearer(headers: Headers) -> list[bytes]:
    given = [value.partition(b' ') for value in _values(headers, 'authorization')]
    return [token.strip() for scheme, _, token in given if scheme.lower() == b'bearer']


def _values(headers: Headers, name: str) -> list[bytes]:
    return [value.strip() for key, value in headers.raw if key == name.encode()]
