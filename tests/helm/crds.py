"""JSON schemas of custom resources, as strict as an API server that drops unknown fields with a warning."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

CRDS_DIR = Path(__file__).parents[3] / 'shared/data/crds'
FILES = {
    'RayService': 'ray.io_rayservices.yaml',
    'PodMonitor': 'monitoring.coreos.com_podmonitors.yaml',
    'PrometheusRule': 'monitoring.coreos.com_prometheusrules.yaml',
}


@functools.cache
def validator(kind: str, version: str) -> jsonschema.Draft7Validator:
    """Return the validator of a kind, or skip the test where the definitions are not at hand."""
    path = CRDS_DIR / FILES[kind]
    if not path.is_file():
        pytest.skip(f'no custom resource definitions at {CRDS_DIR}, so {kind} is not checked')
    definition = yaml.load(path.read_text(), getattr(yaml, 'CSafeLoader', yaml.SafeLoader))
    (schema,) = [
        entry['schema']['openAPIV3Schema'] for entry in definition['spec']['versions'] if entry['name'] == version
    ]
    strict = _strict(schema)
    strict['properties']['metadata'] = {'type': 'object'}
    return jsonschema.Draft7Validator(strict)


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an OpenAPI schema as a JSON schema that refuses what it does not list."""
    made = {key: value for key, value in schema.items() if not key.startswith('x-kubernetes') and key != 'format'}
    for key in ('properties', 'patternProperties'):
        if key in made:
            made[key] = {name: _strict(value) for name, value in made[key].items()}
    for key in ('items', 'additionalProperties'):
        if isinstance(made.get(key), dict):
            made[key] = _strict(made[key])
    keeps_unknown = schema.get('x-kubernetes-preserve-unknown-fields', False)
    if made.get('type') == 'object' and not keeps_unknown:
        made.setdefault('additionalProperties', False)
    return made
