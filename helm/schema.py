"""values.schema.json from values.yaml, Kubernetes' own schemas and the application's configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate

from actors.config import AppConfig
from helm.shapes import Schema
from helm.values import read_values, shape

_KUBERNETES = 'v1.37.0-local-strict'


def schema() -> str:
    """Return values.schema.json."""
    values, comments = read_values()
    app = AppConfig.model_json_schema(ref_template='#/definitions/{model}')
    definitions = _bare(app.pop('$defs')) | {'AppConfig': _bare(app)}
    _require_defaults(definitions, definitions['AppConfig'], values['config'])
    root = _section(values, '', comments)
    root['properties']['global'] = {'type': 'object', 'description': 'What a parent chart gives to all its charts.'}
    root['definitions'] = definitions | _kubernetes_types(root)
    return json.dumps({'$schema': 'http://json-schema.org/draft-07/schema#'} | root, indent=1, sort_keys=True) + '\n'


def _section(values: Mapping[str, Any], path: str, comments: Mapping[str, str]) -> Schema:
    properties = {}
    for key, value in values.items():
        inner = f'{path}.{key}'.lstrip('.')
        known = shape(inner)
        if known is None:
            known = _section(value, inner, comments) if isinstance(value, Mapping) else _scalar(inner, value)
        description = {'description': comments[inner]} if comments.get(inner) else {}
        properties[key] = known | description
    required = [key for key, value in values.items() if value is not None]
    return {'type': 'object', 'properties': properties, 'required': required, 'additionalProperties': False}


def _scalar(path: str, value: Any) -> Schema:
    names = {bool: 'boolean', int: 'integer', str: 'string'}
    if type(value) not in names:
        raise ValueError(f'values.yaml: {path}: its default {value!r} says no type; add it to SHAPES')
    return {'type': names[type(value)]}


def _require_defaults(definitions: Mapping[str, Schema], section: Schema, values: Mapping[str, Any]) -> None:
    """Require what the templates read, so that setting it to null is refused by name."""
    names = [name for name in values if 'anyOf' not in section['properties'][name]]
    section['required'] = sorted({*section.get('required', ()), *names})
    for name in names:
        reference = section['properties'][name].get('$ref', '').rpartition('/')[2]
        if reference:
            _require_defaults(definitions, definitions[reference], values[name])


def _kubernetes_types(root: Schema) -> dict[str, Schema]:
    """Return the types of Kubernetes that `root` refers to, and those below them."""
    folder = Path(kubernetes_validate.__file__).parent / 'kubernetes-json-schema' / _KUBERNETES
    known = json.loads((folder / '_definitions.json').read_text())['$defs']
    found: dict[str, Schema] = {}
    wanted = [name for name in _references(root) if name.startswith('io.k8s.')]
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = _bare(known[name])
            wanted += _references(found[name])
    return found


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get('$ref'), str):
            yield schema['$ref'].rpartition('/')[2]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _bare(schema: Any, is_schema: bool = True) -> Any:
    """Return a schema without prose and defaults, its references pointing into this file."""
    if isinstance(schema, list):
        return [_bare(value) for value in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for key, value in schema.items():
        if is_schema and (key in ('title', 'default', 'description') or key.startswith('x-kubernetes')):
            continue
        if key == '$ref' and isinstance(value, str):
            kept[key] = f'#/definitions/{value.rpartition("/")[2]}'
        else:
            kept[key] = _bare(value, is_schema=not (is_schema and key == 'properties'))
    return kept
