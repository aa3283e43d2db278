"""Requests that are too large are refused before anybody handles them, and the others arrive unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from actors.limits import SizeLimits

BODY, HEADERS = 1000, 2000


@pytest.fixture
def client() -> TestClient:
    """An application that returns the length of the body it got."""
    app = FastAPI()

    @app.post('/length')
    async def length(request: Request) -> int:
        return len(await request.body())

    app.add_middleware(SizeLimits, max_body_bytes=BODY, max_header_bytes=HEADERS)
    return TestClient(app)


def pieces(size: int) -> Iterator[bytes]:
    """Yield a body in pieces, so that it is sent without a length."""
    for start in range(0, size, 100):
        yield b'x' * min(100, size - start)


@pytest.mark.parametrize('chunked', [False, True], ids=['with-length', 'chunked'])
@pytest.mark.parametrize(
    ('size', 'status'), [(0, 200), (1, 200), (BODY, 200), (BODY + 1, 413), (50 * BODY, 413)], ids=str
)
def test_bodies(client: TestClient, size: int, status: int, chunked: bool) -> None:
    response = client.post('/length', content=pieces(size) if chunked else b'x' * size)
    assert response.status_code == status
    if status == 200:
        assert response.json() == size
    else:
        error = response.json()['error']
        assert error['message'] == f'The body is larger than {BODY} bytes.'
        assert (error['type'], error['code']) == ('invalid_request_error', 'request_too_large')


@pytest.mark.parametrize('length', ['-1', '1e3', 'x', '9' * 30], ids=str)
def test_a_length_that_lies_helps_nobody(client: TestClient, length: str) -> None:
    response = client.post('/length', content=pieces(2 * BODY), headers={'content-length': length})
    assert response.status_code == 413


@pytest.mark.parametrize('count', [1, 20], ids=['one', 'many'])
def test_headers(client: TestClient, count: int) -> None:
    value = 'x' * (HEADERS // count)
    response = client.post('/length', headers={f'x-{number}': value for number in range(count)})
    assert response.status_code == 431
    assert response.json()['error']['message'] == f'The headers are larger than {HEADERS} bytes.'
