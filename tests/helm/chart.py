"""The chart as tests see it: rendered by a real helm, as parsed manifests."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.patience import LIVENESS_S
from tests.tools import tool

ROOT = Path(__file__).parents[2]
CHART = ROOT / 'helm/replayssm'
CI_FILES = tuple(sorted(path.name.removesuffix('-values.yaml') for path in (CHART / 'ci').glob('*-values.yaml')))
HELMS = ('helm3', 'helm4')

Manifest = dict[str, Any]


def helm(version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one helm; what it says is in `stdout` and `stderr`."""
    return subprocess.run([tool(version), *arguments], capture_output=True, text=True, timeout=LIVENESS_S, check=False)


@functools.cache
def template(
    feature: str = 'default', *sets: str, version: str = 'helm3', release: str = 'llm', chart: Path = CHART
) -> str:
    """Return what `helm template` prints for a file under ci/ and `--set-json key=value` options."""
    options = [option for pair in sets for option in ('--set-json', pair)]
    values = str(CHART / 'ci' / f'{feature}-values.yaml')
    done = helm(version, 'template', release, str(chart), '--namespace', 'inference', '--values', values, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def manifests(feature: str = 'default', *sets: str, **options: Any) -> list[Manifest]:
    """Return the manifests; arguments as of `template`."""
    return [document for document in yaml.safe_load_all(template(feature, *sets, **options)) if document]


def one(kind: str, feature: str = 'default', *sets: str, **options: Any) -> Manifest:
    """Return the only manifest of a kind."""
    (found,) = [manifest for manifest in manifests(feature, *sets, **options) if manifest['kind'] == kind]
    return found


def refusal(*sets: str, feature: str = 'default', version: str = 'helm3', release: str = 'llm') -> str:
    """Return what helm says about values that it refuses."""
    options = [option for pair in sets for option in ('--set-json', pair)]
    values = str(CHART / 'ci' / f'{feature}-values.yaml')
    done = helm(version, 'template', release, str(CHART), '--values', values, *options)
    assert done.returncode != 0, done.stdout
    return done.stderr


def cluster(feature: str = 'default', *sets: str, **options: Any) -> Manifest:
    """Return the RayService's `rayClusterConfig`."""
    return one('RayService', feature, *sets, **options)['spec']['rayClusterConfig']


def groups(ray_cluster: Mapping[str, Any]) -> dict[str, Manifest]:
    """Return the head group and the only worker group by role."""
    (worker,) = ray_cluster['workerGroupSpecs']
    return {'head': ray_cluster['headGroupSpec'], 'worker': worker}


def pods(feature: str = 'default', *sets: str, **options: Any) -> dict[str, Manifest]:
    """Return the pod specs by role."""
    return {role: group['template']['spec'] for role, group in groups(cluster(feature, *sets, **options)).items()}


def container(pod: Mapping[str, Any]) -> Manifest:
    (found,) = pod['containers']
    return found


def serve_config(feature: str = 'default', *sets: str, **options: Any) -> Manifest:
    """Return the parsed `serveConfigV2`."""
    return yaml.safe_load(one('RayService', feature, *sets, **options)['spec']['serveConfigV2'])


def notes(folder: Path, feature: str) -> str:
    """Return NOTES.txt as an installation prints it; `helm template` has no option for that.

    The notes are rendered inside a ConfigMap of a copy of the chart, under `folder`.
    """
    copy = folder / 'replayssm'
    shutil.copytree(CHART, copy)
    text = (copy / 'templates/NOTES.txt').read_text()
    (copy / 'templates/_notes.tpl').write_text(f'{{{{ define "notes" }}}}{text}{{{{ end }}}}')
    (copy / 'templates/NOTES.txt').unlink()
    config_map = {'apiVersion': 'v1', 'kind': 'ConfigMap', 'metadata': {'name': 'notes'}}
    data = 'data: {text: {{ include "notes" . | toJson }}}\n'
    (copy / 'templates/notes.yaml').write_text(yaml.safe_dump(config_map) + data)
    (found,) = [manifest for manifest in manifests(feature, chart=copy) if manifest['metadata']['name'] == 'notes']
    return str(found['data']['text'])


def schema_of_values() -> dict[str, Any]:
    return dict(json.loads((CHART / 'values.schema.json').read_text()))
