"""Checks of Serve's `ssl_*` options: what Serve would take without a word, and what would fail late."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.config_error import ConfigError


def check_options(options: Mapping[str, Any]) -> None:
    """Check `http_options` as they stand in the file.

    Raises:
        ConfigError: The service would be less protected than they say.
    """
    for given, missing in (('ssl_keyfile', 'ssl_certfile'), ('ssl_certfile', 'ssl_keyfile')):
        if options.get(given) and not options.get(missing):
            raise ConfigError(f'http_options.{missing}: required with {given}, but not given')
    if options.get('ssl_ca_certs'):
        path = options['ssl_ca_certs']
        raise ConfigError(
            f'http_options.ssl_ca_certs: got {path!r}; Serve asks no client for a certificate, so it would protect '
            'nothing; remove it, and put a gateway in front for mutual TLS'
        )


def check_files(options: Mapping[str, Any]) -> None:
    """Check that this machine can serve with certificate and key of `http_options`, if they have any.

    Raises:
        ConfigError: A file is missing, or they do not belong together.
    """
    certificate, key = options.get('ssl_certfile'), options.get('ssl_keyfile')
    if not certificate or not key:
        return
    for name in ('ssl_certfile', 'ssl_keyfile'):
        try:
            with Path(options[name]).open('rb'):
                pass
        except OSError as error:
            raise ConfigError(f'http_options.{name}: got {options[name]!r}; {error.strerror}') from None
    # Never asks at the terminal: an encrypted key without a password is an error too.
    password = options.get('ssl_keyfile_password') or ''
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, lambda: password)
    except ssl.SSLError as error:
        raise ConfigError(
            f'http_options.ssl_certfile, ssl_keyfile: got {certificate!r} and {key!r}; {error.reason or error}; '
            'expected a certificate and its key in PEM form, and ssl_keyfile_password if the key is encrypted'
        ) from None
