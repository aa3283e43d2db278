"""Certificates that cannot serve are found before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.config_error import ConfigError
from actors.serve_file import load
from actors.tls import check_files
from tests.actors.certificates import Pair, make_pair


@pytest.fixture(scope='module')
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp('pair'))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        pytest.param({'ssl_keyfile': 'key.pem'}, 'http_options.ssl_certfile: required with ssl_keyfile', id='key'),
        pytest.param({'ssl_certfile': 'c.pem'}, 'http_options.ssl_keyfile: required with ssl_certfile', id='cert'),
        pytest.param({'ssl_ca_certs': 'ca.pem'}, 'Serve asks no client for a certificate', id='client-certificates'),
        pytest.param({'ssl_kefile': 'key.pem'}, "ssl_kefile: unknown key; did you mean 'ssl_keyfile'", id='misspelt'),
    ],
)
def test_options_that_would_not_protect(tmp_path: Path, options: dict[str, str], message: str) -> None:
    path = tmp_path / 'serve.yaml'
    application = {'import_path': 'actors.app:build_app', 'args': {'model': {'name': 'x', 'path': '/none'}}}
    path.write_text(yaml.safe_dump({'http_options': options, 'applications': [application]}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(path)


def test_a_pair_serves(pair: Pair, tmp_path: Path) -> None:
    check_files({})
    check_files(pair.http_options())
    encrypted = make_pair(tmp_path, password='open sesame')
    check_files({**encrypted.http_options(), 'ssl_keyfile_password': 'open sesame'})
    with pytest.raises(ConfigError, match='ssl_keyfile_password if the key is encrypted'):
        check_files(encrypted.http_options())


def test_files_that_cannot_serve(pair: Pair, tmp_path: Path) -> None:
    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            check_files({**pair.http_options(), **options})

    refused("http_options.ssl_keyfile: got '/none/key.pem'; No such file", ssl_keyfile='/none/key.pem')
    other = make_pair(tmp_path)
    refused('KEY_VALUES_MISMATCH', ssl_keyfile=str(other.key))
    other.certificate.write_text('no certificate')
    refused('expected a certificate and its key in PEM form', ssl_certfile=str(other.certificate))
