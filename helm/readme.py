"""The table of values in the chart's README, from values.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from actors.config import AppConfig
from helm.values import is_section, read_values

_HEADING = '## Values\n'


def readme(text: str) -> str:
    """Return the README `text` with its table of values made anew."""
    values, comments = read_values()
    head = text.partition(_HEADING)[0]
    rows = ''.join(_rows(values, comments))
    return f'{head}{_HEADING}\nFrom the comments in `values.yaml`, by `make docs`; do not edit.\n{rows}'


def _rows(values: Mapping[str, Any], comments: Mapping[str, str]) -> Iterator[str]:
    """Yield a table per top-level section, each key that is not a section a row."""
    leaves = [key for key, value in values.items() if not is_section(key, value)]
    if leaves:
        yield '\n| key | default | meaning |\n|---|---|---|\n'
        yield from (_row(key, values[key], comments[key]) for key in leaves)
    for section in values:
        if section not in leaves:
            yield f'\n### `{section}`\n\n'
            yield f'{comments[section]}\n\n' if comments[section] else ''
            yield '| key | default | meaning |\n|---|---|---|\n'
            yield from (_row(key, value, comments.get(key, '')) for key, value in _leaves(values[section], section))


def _leaves(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        inner = f'{path}.{key}'
        if is_section(inner, value):
            yield from _leaves(value, inner)
        else:
            yield inner, value


def _row(key: str, value: Any, comment: str) -> str:
    return f'| `{key}` | `{json.dumps(value)}` | {comment or _field_description(key)} |\n'


def _field_description(key: str) -> str:
    """Return what the application says about one of its keys, without a comment in values.yaml."""
    head, *parts = key.split('.')
    if head != 'config':
        return ''
    schema = AppConfig.model_json_schema()
    node = schema
    for part in parts:
        node = node['properties'][part]
        choices = [node, *node.get('anyOf', ())]
        reference = next((option['$ref'] for option in choices if '$ref' in option), None)
        if reference:
            node = schema['$defs'][reference.rpartition('/')[2]]
    return str(node.get('description', ''))
