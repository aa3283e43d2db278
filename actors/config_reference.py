"""docs/configuration.md from the typed configuration: `python -m actors.config_reference docs/configuration.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from actors.config import AppConfig

_HEAD = """\
# Configuration

Generated from `actors/config.py` by `make docs`; do not edit.

These are the keys under `args` of an application in a Serve config file, such as `deploy/local.yaml`. Around them the
file has [Ray Serve's own keys](https://docs.ray.io/en/latest/serve/production-guide/config.html). An unknown key is
refused with the nearest one that exists; among Serve's own keys `make serve` sees to that. Only `model.name` and one of
`model.path` and `model.demo` have to be given. Keys that end in `_s` are seconds. `None` is YAML's `null`.

Beyond the bounds of single keys:

- `engine.block_size` is a power of two.
- On device `cpu`, `engine.num_gpu_blocks` is given; on `cuda`, `engine.dtype` is not `float32`.
- `engine.replay.buffer_len` is at least `1 + engine.speculative.num_tokens`.
- ReplaySSM needs `engine.fixes.continuation`, which needs `engine.fixes.mrope`.
"""

_SIGNS = {
    annotated_types.Ge: ('ge', '≥'),
    annotated_types.Gt: ('gt', '>'),
    annotated_types.Le: ('le', '≤'),
    annotated_types.Lt: ('lt', '<'),
}


def reference() -> str:
    """Return the page."""
    return _HEAD + ''.join(_section(AppConfig, ''))


def _section(section: type[BaseModel], path: str) -> Iterator[str]:
    rows: list[str] = []
    below: list[str] = []
    for name, field in section.model_fields.items():
        key = f'{path}.{name}'.lstrip('.')
        inner = _inner_section(field)
        if inner is not None:
            below += _section(inner, key)
        if inner is None or field.default is None:
            rows.append(f'| `{key}` | {_type(field)} | {_default(field)} | {_bounds(field)} | {field.description} |\n')
    if path:
        yield f'\n## `{path}`\n\n{section.__doc__}\n\n'
        yield '| key | type | default | bounds | meaning |\n|---|---|---|---|---|\n'
        yield from rows
    yield from below


def _inner_section(field: FieldInfo) -> type[BaseModel] | None:
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _type(field: FieldInfo) -> str:
    return ' or '.join(_names(field.annotation))


def _names(kind: Any) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield from (f'`{value}`' for value in get_args(kind))
    elif get_origin(kind) is tuple:
        yield f'list of {get_args(kind)[0].__name__}'
    elif get_origin(kind) is Annotated:
        yield from _names(get_args(kind)[0])
    elif kind is NoneType:
        yield '`null`'
    elif get_args(kind):
        for part in get_args(kind):
            yield from _names(part)
    else:
        yield 'section' if issubclass(kind, BaseModel) else kind.__name__


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return 'required'
    match field.default:
        case None:
            return '`null`'
        case bool(value):
            return f'`{str(value).lower()}`'
        case ():
            return '`[]`'
        case float(value):
            return f'`{value:g}`'
        case value:
            return f'`{value}`'


def _bounds(field: FieldInfo) -> str:
    bounds = []
    for constraint in field.metadata:
        if isinstance(constraint, annotated_types.MinLen):
            bounds.append('not empty')
        elif type(constraint) in _SIGNS:
            attribute, sign = _SIGNS[type(constraint)]
            bounds.append(f'{sign} {getattr(constraint, attribute)}')
    return ', '.join(bounds)


if __name__ == '__main__':
    Path(sys.argv[1]).write_text(reference())
