"""Requests made from the OpenAPI document; `make fuzz` sends more of them."""

from __future__ import annotations

import asyncio

import pytest
import requests

from tests.actors.fuzz import fuzz
from tests.actors.secure.conftest import KEY, MODEL, Secured

CASES = 300


@pytest.mark.soak
async def test_no_request_ends_in_a_server_error(secured: Secured) -> None:
    with requests.Session() as session:
        session.verify = str(secured.certificate)
        session.trust_env = False  # a bundle named in the environment would win over the line above
        session.headers.update({'x-api-key': KEY, 'anthropic-version': '2023-06-01'})
        report = await asyncio.to_thread(fuzz, secured.url, session, MODEL, CASES, 0)
    assert report.failures == []
    # An operation whose body is simple may run out of different ones.
    assert report.cases > CASES / 2
    answered = {path for path, status in report.statuses if status == 200}
    assert '/ui/state' in answered
    assert answered & {'/v1/chat/completions', '/v1/completions', '/v1/messages', '/v1/responses'}
