"""The PromQL of dashboards and rules, made ready to be asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tests.observability.conftest import GPU_MODEL, MODEL, ROOT, RULES, WINDOW, shortened

DASHBOARDS = sorted((ROOT / 'deploy/grafana/dashboards').glob('*.json'))

_SET_OPERATOR = re.compile(r'\s+(?:and|unless)\s+(?:on|ignoring)\s*\([^)]*\)\s+')
_COMPARISON = re.compile(r'\s(==|!=|<=|>=|<|>)\s')
_ABSENT = re.compile(r'absent(\(.*\))')


@dataclass(frozen=True, slots=True)
class Expression:
    """One expression that must return data, and where it comes from."""

    origin: str
    promql: str


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the panels that have queries, rows left out."""
    yield from (panel for panel in dashboard['panels'] if panel['type'] != 'row')


def panel_expressions() -> list[Expression]:
    """Return the expressions of all panels, for the model that has what they ask about."""
    found = []
    for path in DASHBOARDS:
        for panel in panels(json.loads(path.read_text())):
            for target in panel['targets']:
                origin = f'{path.stem} / {panel["title"]} {target["refId"]}'
                found.append(Expression(origin, _filled(target['expr'])))
    return found


def rules() -> list[dict[str, Any]]:
    """Return all rules, as they are in the repository."""
    return [rule for group in yaml.safe_load(RULES.read_text())['groups'] for rule in group['rules']]


def rule_expressions() -> list[Expression]:
    """Return what the rules are made of: recorded series, and both sides of what alerts compare.

    An alert's own expression is empty while all is well, so its comparisons are turned into values, and operands of
    set operators are asked one by one.
    """
    found = [
        Expression(rule['record'], f'{rule["record"]}{{model_name="{MODEL}"}}') for rule in rules() if 'record' in rule
    ]
    for rule in rules():
        if 'alert' in rule:
            for operand in _SET_OPERATOR.split(shortened(rule['expr'])):
                promql = _COMPARISON.sub(r' \1 bool ', _ABSENT.sub(r'\1', operand))
                found.append(Expression(rule['alert'], promql))
    return found


def _filled(expr: str) -> str:
    """Put values in place of the dashboards' variables."""
    # No GPU here: those panels are asked about the exporter whose GPUs are made up.
    model = GPU_MODEL if 'replayssm_gpu_' in expr else MODEL
    filled = expr.replace('$model_name', model).replace('$replica', '.+').replace('$__rate_interval', WINDOW)
    assert '$' not in filled, expr
    return filled
