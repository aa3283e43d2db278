"""The chart's values.yaml: defaults, and the comment above each key, which is its description."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from helm.shapes import SHAPES, Schema

CHART = Path(__file__).parent / 'replayssm'

_KEY = re.compile(r'( *)([\w.-]+):')


def read_values() -> tuple[dict[str, Any], dict[str, str]]:
    """Return the defaults, and every comment by the dotted path of the key under it."""
    text = (CHART / 'values.yaml').read_text()
    comments: dict[str, str] = {}
    path: list[str] = []
    above: list[str] = []
    for line in text.splitlines():
        match = _KEY.match(line)
        if line.lstrip().startswith('#'):
            above.append(line.strip().removeprefix('#').strip())
            continue
        if match:
            path = [*path[: len(match[1]) // 2], match[2]]
            comments['.'.join(path)] = ' '.join(above)
        above = []
    return yaml.safe_load(text), comments


def shape(path: str) -> Schema | None:
    """Return what `SHAPES` says about a key."""
    return SHAPES.get(path) or SHAPES.get(path.rpartition('.')[2])


def is_section(path: str, value: Any) -> bool:
    """Tell whether the keys below are values of their own."""
    return isinstance(value, Mapping) and bool(value) and (path == 'config' or shape(path) is None)
