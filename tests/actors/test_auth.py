"""API keys and administrators' tokens: which are valid, and what others get."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from actors.auth import ApiKeyMiddleware, RequireAdmin, TokenFile
from actors.config_error import ConfigError
from actors.error_form import http_exception_response
from actors.middleware import RequestScopeMiddleware


def token_file(path: Path, text: str) -> TokenFile:
    path.write_text(text)
    return TokenFile(str(path), 'api.api_keys_file')


def test_lines_are_tokens_and_comments_are_not(tmp_path: Path) -> None:
    tokens = token_file(tmp_path / 'keys', '# of the team\n  first \n\nsecond\r\nkey with spaces#1')
    assert all(tokens.holds([token]) for token in (b'first', b'second', b'key with spaces#1'))
    assert not any(tokens.holds([token]) for token in (b'', b'firs', b'first ', b'third', b'# of the team', b'FIRST'))
    assert not tokens.holds([])
    assert tokens.holds([b'third', b'second'])


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        pytest.param(None, 'No such file or directory, name a file with one token per line', id='missing'),
        pytest.param('# nothing\n\n', 'the file holds no token, write one per line', id='empty'),
    ],
)
def test_a_file_without_tokens_stops_the_start(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / 'keys'
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"api.api_keys_file: got '{path}'; {message}"):
        TokenFile(str(path), 'api.api_keys_file')


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / 'keys'
    tokens = token_file(path, 'old')
    seen = path.stat()
    path.write_text('new')
    # Even where size and modification time are those of before.
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert not tokens.holds([b'old'])
    assert tokens.holds([b'new'])


def test_a_mounted_secret_that_kubernetes_swaps(tmp_path: Path) -> None:
    for name, text in (('..1', 'old'), ('..2', 'new')):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'keys').write_text(text)
        os.utime(tmp_path / name / 'keys', (1, 1))
    (tmp_path / '..data').symlink_to('..1')
    (tmp_path / 'keys').symlink_to('..data/keys')
    tokens = TokenFile(str(tmp_path / 'keys'), 'api.api_keys_file')
    assert tokens.holds([b'old'])
    (tmp_path / '..data_tmp').symlink_to('..2')
    (tmp_path / '..data_tmp').rename(tmp_path / '..data')
    assert tokens.holds([b'new'])
    assert not tokens.holds([b'old'])


def test_tokens_outlive_their_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / 'keys'
    tokens = token_file(path, 'first')
    path.unlink()
    assert tokens.holds([b'first'])
    assert not tokens.holds([b'second'])
    assert len([record for record in caplog.records if 'stay valid' in record.message]) == 1
    path.write_text('second')
    assert tokens.holds([b'second'])
    path.write_text('')
    assert not tokens.holds([b'second'])
    assert 'first' not in caplog.text.replace(str(path), '')


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    """An application with the key `secret`, the administrator's token `root` and routes of every kind."""
    app = FastAPI()
    routes = APIRouter()
    for path in ('/health', '/v1/models', '/v1/messages', '/docs2'):
        routes.add_api_route(path, lambda: {'ok': True}, methods=['GET', 'POST'])
    app.include_router(routes)
    guard = RequireAdmin(token_file(tmp_path / 'admin', 'root'))
    app.add_api_route('/admin/reload', lambda: {'ok': True}, methods=['POST'], dependencies=[Depends(guard)])
    closed = RequireAdmin(None)
    app.add_api_route('/admin/closed', lambda: {'ok': True}, methods=['POST'], dependencies=[Depends(closed)])
    app.add_exception_handler(HTTPException, http_exception_response)
    app.add_middleware(
        ApiKeyMiddleware, keys=token_file(tmp_path / 'keys', 'secret\nother'), open_paths=frozenset({'/health'})
    )
    app.add_middleware(RequestScopeMiddleware)
    return TestClient(app)


@pytest.mark.parametrize(
    ('headers', 'passes'),
    [
        pytest.param({}, False, id='none'),
        pytest.param({'authorization': 'Bearer secret'}, True, id='bearer'),
        pytest.param({'authorization': 'bearer  other'}, True, id='bearer-other-key'),
        pytest.param({'x-api-key': 'secret'}, True, id='x-api-key'),
        pytest.param({'authorization': 'Bearer wrong', 'x-api-key': 'secret'}, True, id='either'),
        pytest.param({'authorization': 'Bearer secre'}, False, id='prefix'),
        pytest.param({'authorization': 'Bearer secret2'}, False, id='longer'),
        pytest.param({'authorization': 'Bearer '}, False, id='empty'),
        pytest.param({'authorization': 'Basic secret'}, False, id='other-scheme'),
        pytest.param({'authorization': 'secret'}, False, id='no-scheme'),
        pytest.param({'x-api-key': 'root'}, False, id='admin-token'),
    ],
)
@pytest.mark.parametrize('path', ['/v1/models', '/docs2', '/no/such/path', '/health/', '//health', '/healthy'])
def test_keys_open_everything_but_probes_and_administration(
    client: TestClient, path: str, headers: dict[str, str], passes: bool
) -> None:
    response = client.get(path, headers=headers, follow_redirects=False)
    assert (response.status_code != 401) == passes
    if not passes:
        assert response.headers['www-authenticate'] == 'Bearer'
        error = response.json()['error']
        assert (error['type'], error['code']) == ('authentication_error', 'invalid_api_key')
        assert 'x-api-key' in error['message']


def test_probes_need_no_key(client: TestClient) -> None:
    assert client.get('/health').json() == {'ok': True}


def test_anthropics_clients_see_its_form(client: TestClient) -> None:
    response = client.post('/v1/messages')
    assert response.status_code == 401
    assert response.headers['www-authenticate'] == 'Bearer'
    assert response.json()['type'] == 'error'
    assert response.json()['error']['type'] == 'authentication_error'


@pytest.mark.parametrize(
    ('path', 'headers', 'status'),
    [
        pytest.param('/admin/reload', {'authorization': 'Bearer root'}, 200, id='admin'),
        pytest.param('/admin/reload', {}, 401, id='nobody'),
        pytest.param('/admin/reload', {'authorization': 'Bearer secret'}, 401, id='api-key'),
        pytest.param('/admin/reload', {'x-api-key': 'root'}, 401, id='other-header'),
        pytest.param('/admin/closed', {'authorization': 'Bearer root'}, 404, id='no-token-configured'),
        pytest.param('/admin/none', {}, 404, id='no-such-route'),
    ],
)
def test_administration_has_a_token_of_its_own(
    client: TestClient, path: str, headers: dict[str, Any], status: int
) -> None:
    response = client.post(path, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.headers['www-authenticate'] == 'Bearer'
        assert 'administrator' in response.json()['error']['message']
    if status == 404:
        assert response.json() == client.post('/admin/none').json()
