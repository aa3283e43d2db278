"""`/ui`: the page, its files, and `/ui/state`."""

from __future__ import annotations

import mimetypes
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, HTTPException, Response
from ray.exceptions import RayActorError

from actors.messages import RouterStats
from actors.ui.state import UiState, ui_state

_STATIC = {path.name: path for path in sorted((Path(__file__).parent / 'static').iterdir())}
_PAGE = 'index.html'
STATE_PATH = '/ui/state'
OPEN_PATHS = frozenset({'/ui', '/ui/', *(f'/ui/{name}' for name in _STATIC if name != _PAGE)})
"""What anybody may load: the page asks for an API key itself, and has no number in it before."""

_HEADERS = {
    # Nothing inline, nothing from elsewhere: text of a model that got into the page could still not run.
    'content-security-policy': "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    'x-content-type-options': 'nosniff',
    'referrer-policy': 'no-referrer',
    'cache-control': 'no-cache',
}


def ui_router(stats: Callable[[], Awaitable[RouterStats]]) -> APIRouter:
    """Return the routes of the status page.

    Args:
        stats: Returns all numbers of the moment, as `Router.stats` does; awaited once per request of `STATE_PATH`.
    """
    router = APIRouter(tags=['status page'])

    @router.get(STATE_PATH)
    async def state(response: Response) -> UiState:
        """Return the numbers of this moment."""
        response.headers['cache-control'] = 'no-store'
        try:
            return ui_state(await stats(), time.time())
        except RayActorError:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, 'The router is starting again.') from None

    for name, path in _STATIC.items():
        url = '/ui' if name == _PAGE else f'/ui/{name}'
        router.add_api_route(url, _file(path), methods=['GET', 'HEAD'], include_in_schema=False)
    return router


def _file(path: Path) -> Callable[[], Awaitable[Response]]:
    content = path.read_bytes()
    media_type = mimetypes.guess_type(path.name)[0]

    async def send() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return send
