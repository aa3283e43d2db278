"""Errors of a configuration that say which key is wrong and what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


class ConfigError(ValueError):
    """A configuration that cannot work; the message names field, value and remedy, one problem per line."""


def nearest(key: str, valid: Iterable[str]) -> str:
    """Return a hint such as `did you mean 'block_size'?`, or the list of valid keys when none is near."""
    names = sorted(valid)
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.6)
    if near:
        return 'did you mean ' + ' or '.join(repr(name) for name in near) + '?'
    return 'valid keys: ' + ', '.join(names)


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """Return one line per problem with a configuration of type `root`."""
    return '\n'.join(_explain_one(detail, root) for detail in error.errors())


def _explain_one(detail: Mapping[str, Any], root: type[BaseModel]) -> str:
    path = tuple(str(part) for part in detail['loc'])
    where = '.'.join(path) or 'args'
    if detail['type'] == 'extra_forbidden':
        return f'{where}: unknown key; {_hint(path, root)}'
    if detail['type'] == 'missing':
        return f'{where}: required, but not given'
    message = str(detail['msg']).removeprefix('Value error, ')
    value = '' if isinstance(detail['input'], Mapping) else f'got {detail["input"]!r}; '
    return f'{where}: {value}{message}'


def _hint(path: tuple[str, ...], root: type[BaseModel]) -> str:
    *parents, key = path
    homes = [home for home, section in _sections(root) if key in section.model_fields]
    if homes:
        return f'{key!r} belongs to ' + ' or '.join(home or 'the top level' for home in homes)
    here = next(section for home, section in _sections(root) if home == '.'.join(parents))
    return nearest(key, here.model_fields)


def _sections(section: type[BaseModel], home: str = '') -> Iterable[tuple[str, type[BaseModel]]]:
    """Yield every section below `section` with its dotted path."""
    yield home, section
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _sections(kind, f'{home}.{name}'.lstrip('.'))
