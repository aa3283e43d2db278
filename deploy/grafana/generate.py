"""All generated files of monitoring as text, so that a test can compare them with what is committed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana import engine, overview, router, state_memory

DASHBOARDS: Mapping[str, Dashboard] = MappingProxyType(
    {
        'overview': overview.build(),
        'state_memory': state_memory.build(),
        'router': router.build(),
        'engine': engine.build(),
    }
)
RULES = 'deploy/prometheus/rules.yaml'
CHART_FILES = 'helm/replayssm/files'
"""Helm packages no file outside its chart."""


def generated(root: Path) -> dict[str, str]:
    """Return the text of every generated file by its path below `root`, which also holds the rules."""
    files = {f'{CHART_FILES}/rules.yaml': (root / RULES).read_text()}
    for name, dashboard in DASHBOARDS.items():
        text = JSONEncoder(sort_keys=True, indent=2).encode(dashboard.build()) + '\n'
        files[f'deploy/grafana/dashboards/{name}.json'] = text
        files[f'{CHART_FILES}/dashboards/{name}.json'] = text
    return files
