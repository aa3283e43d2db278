"""Requests that nobody thought of, made by schemathesis from the service's OpenAPI: none may end in a server error.

`python -m tests.actors.fuzz --cases 10000` serves the demo model and sends them to it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.schemas import APIOperation

from actors.config import AppConfig
from actors.local import Deployment, wait_until_ready
from tests.actors.service.conftest import MODEL
from tests.patience import LIVENESS_S
from tests.ports import free_port

MAX_TOKENS = 8
"""Of one answer: what is tested lies before and after the tokens."""
MESSAGES = [{'role': 'user', 'content': 'hello'}]
ANSWERABLE: dict[str, dict[str, Any]] = {
    '/v1/chat/completions': {'messages': MESSAGES, 'max_completion_tokens': MAX_TOKENS},
    '/v1/completions': {'prompt': 'hello', 'max_completion_tokens': MAX_TOKENS},
    '/v1/messages': {'messages': MESSAGES, 'max_tokens': MAX_TOKENS},
    '/v1/messages/count_tokens': {'messages': MESSAGES},
    '/v1/responses': {'input': 'hello', 'max_output_tokens': MAX_TOKENS},
    '/v1/encode': {'input': 'hello'},
}
"""A body per path that gets an answer, once it names the model."""


@dataclass(slots=True)
class Report:
    """What came back.

    Attributes:
        statuses: Number of answers by path and status.
        failures: For every server error, or missing answer, how to ask for it again.
    """

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """Requests sent."""
        return self.statuses.total()


def fuzz(url: str, session: requests.Session, model: str, cases: int, first_seed: int) -> Report:
    """Send about `cases` requests, some as the schema wants them and some not.

    Args:
        url: Of the service.
        session: Its headers and certificates.
        model: That is served.
        cases: Requests, all operations with a body together.
        first_seed: The same seed makes the same requests.
    """
    # Otherwise it hides from us whatever has "token" in its name.
    config = SchemathesisConfig.from_dict({'output': {'sanitization': {'enabled': False}}})
    document = session.get(f'{url}/openapi.json', timeout=LIVENESS_S).json()
    schema = schemathesis.openapi.from_dict(document, config=config)
    operations = [result.ok() for result in schema.get_all_operations()]
    with_body = [operation for operation in operations if operation.body]
    report = Report()
    for operation in operations:
        for mode in GenerationMode:
            # Without a body there is next to nothing to vary.
            share = math.ceil(cases / (len(with_body) * len(GenerationMode))) if operation.body else 2
            _fuzz_operation(operation, mode, share, first_seed, url, session, model, report)
    return report


def _fuzz_operation(
    operation: APIOperation,
    mode: GenerationMode,
    cases: int,
    first_seed: int,
    url: str,
    session: requests.Session,
    model: str,
    report: Report,
) -> None:
    @seed(first_seed)
    @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def send(case: Case, data: st.DataObject) -> None:
        _make_answerable(case, model, data)
        try:
            # Of its own it would verify by the system's certificates, whatever the session says.
            response = case.call(base_url=url, session=session, timeout=LIVENESS_S, verify=session.verify)
        except requests.RequestException as error:
            report.statuses[operation.path, 0] += 1
            report.failures.append(f'{error!r}: {case.as_curl_command()}')
            return
        report.statuses[operation.path, response.status_code] += 1
        if response.status_code >= 500 or 'server_error' in response.text:
            report.failures.append(f'{response.status_code} {response.text[:300]}: {case.as_curl_command()}')

    try:
        send()
    except BaseException as error:
        # A schema that cannot be violated, as of a path without parameters, makes no negative cases.
        if type(error).__name__ != 'Unsatisfiable':
            raise


def _make_answerable(case: Case, model: str, data: st.DataObject) -> None:
    """Take some fields of a body, or all, and for the rest those of an answerable one.

    Nearly every body that is made has something wrong in it; without this the engine would hardly be reached.
    """
    answerable = ANSWERABLE.get(case.operation.path)
    if answerable is None or not isinstance(case.body, dict):
        return
    taken = case.body
    if case.body and data.draw(st.booleans()):
        names = data.draw(st.sets(st.sampled_from(sorted(case.body)), min_size=1, max_size=3))
        taken = {name: case.body[name] for name in names}
    case.body = {'model': model, **answerable, **taken}
    if isinstance(case.body.get('model'), str):
        case.body['model'] = model
    for name in answerable:
        if name.startswith('max_') and _is_many(case.body[name]):
            case.body[name] = MAX_TOKENS


def _is_many(tokens: Any) -> bool:
    return tokens is None or (isinstance(tokens, int) and tokens > MAX_TOKENS)


def main() -> int:
    """Serve the demo model, fuzz it and print what came back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--cases', type=int, default=10_000)
    parser.add_argument('--seed', type=int, default=0)
    options = parser.parse_args()
    engine = {
        'device': 'cpu', 'dtype': 'float32', 'session_len': 512, 'max_batch_size': 8, 'num_gpu_blocks': 512,
        'block_size': 16, 'speculative': {'num_tokens': 3},
    }  # fmt: skip
    config = AppConfig.model_validate(
        {'model': {'name': MODEL, 'demo': 'tiny'}, 'engine': engine, 'metrics': {'port': None}}
    )
    port = free_port()
    url = f'http://127.0.0.1:{port}'
    with Deployment(config, 'fuzz', {'host': '127.0.0.1', 'port': port}), requests.Session() as session:
        wait_until_ready(url)
        session.headers['anthropic-version'] = '2023-06-01'
        report = fuzz(url, session, MODEL, options.cases, options.seed)
    for (path, status), count in sorted(report.statuses.items()):
        print(f'{count:6} times {status} {path}')
    print(*report.failures, f'{report.cases} cases, {len(report.failures)} server errors', sep='\n')
    return 1 if report.failures else 0


if __name__ == '__main__':
    sys.exit(main())
