"""Imports point one way: actors -> replayssm.patch -> gdn | kda -> layout."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for package in ('replayssm', 'actors') for path in (ROOT / package).rglob('*.py'))

FOUNDATION = {'config', 'cursor', 'layout', 'patching'}
MECHANISM = FOUNDATION | {'conv_state', 'gpu', 'stats'}
REACHABLE = {
    'config': set(),
    'conv_state': set(),
    'environment': set(),
    'patching': set(),
    'layout': {'config'},
    'cursor': {'config', 'layout'},
    'stats': {'config', 'layout'},
    'gpu': {'stats'},
    'gdn': FOUNDATION,
    'kda': FOUNDATION | {'gdn'},
    'random_weights': set(),
    'demo': {'config', 'cpu', 'environment', 'patch', 'random_weights', 'stats'},
    'plan': {'config', 'layout'},
    'doctor': set(),
    'cpu': MECHANISM | {'executors', 'gdn', 'kda'},
    'executors': MECHANISM | {'cpu', 'patch'},
    'patch': MECHANISM | {'cpu', 'executors', 'gdn', 'kda', 'models', 'random_weights'},
    'models': MECHANISM | {'gdn', 'kda', 'patch'},
    'api_server': MECHANISM | {'cpu', 'environment', 'patch'},
    'cli': {'config', 'demo', 'doctor', 'plan'},
}
"""Which parts of `replayssm` each part may import, itself aside; a new part adds its line."""
SEEN_BY_ACTORS = {'config', 'cpu', 'demo', 'environment', 'layout', 'patch', 'stats'}
NOT_IN_REPLAYSSM = {'actors', 'prometheus_client', 'ray', 'tests'}


def imported(path: Path) -> Iterator[str]:
    """Yield every module, and every name of a module, that `path` imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path}: relative import'
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def part(dotted: str) -> str | None:
    """Return which part of `replayssm` a dotted name belongs to, None outside or for the package itself."""
    names = dotted.split('.')
    return names[1] if names[0] == 'replayssm' and len(names) > 1 and names[1] != '__version__' else None


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / 'replayssm').parts[0].removesuffix('.py')


@pytest.mark.parametrize('path', MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    names = set(imported(path))
    parts = {found for name in names if (found := part(name)) is not None}
    if path.is_relative_to(ROOT / 'actors'):
        assert parts <= SEEN_BY_ACTORS
        return
    assert not {name.split('.')[0] for name in names} & NOT_IN_REPLAYSSM
    if path.parent == ROOT / 'replayssm' and path.stem == '__init__':
        assert parts == set()
        return
    assert parts - {part_of(path)} <= REACHABLE[part_of(path)]


def test_every_part_is_listed() -> None:
    parts = {part_of(path) for path in MODULES if path.is_relative_to(ROOT / 'replayssm')} - {'__init__'}
    assert parts <= REACHABLE.keys()
