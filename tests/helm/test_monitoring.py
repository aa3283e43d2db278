"""Monitors, rules and dashboards for a Prometheus operator and a Grafana that are there already."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, HELMS, Manifest, cluster, groups, helm, manifests, one, template

MONITORING_KINDS = {'PodMonitor', 'ServiceMonitor', 'PrometheusRule'}
STACK_KINDS = {'Prometheus', 'Alertmanager', 'CustomResourceDefinition', 'ClusterRole', 'Deployment', 'StatefulSet'}


def monitors(feature: str) -> dict[str, Manifest]:
    return {m['metadata']['name']: m['spec'] for m in manifests(feature) if m['kind'] == 'PodMonitor'}


def test_nothing_of_it_is_on_by_default() -> None:
    assert not MONITORING_KINDS & {manifest['kind'] for manifest in manifests()}


def test_an_operator_that_is_there_gets_monitors_and_no_stack() -> None:
    kinds = {manifest['kind'] for manifest in manifests('monitoring')}
    assert {'PodMonitor', 'PrometheusRule'} <= kinds
    assert not STACK_KINDS & kinds


def test_everything_carries_the_label_that_the_operator_selects_by() -> None:
    for manifest in manifests('monitoring'):
        if manifest['kind'] in {*MONITORING_KINDS, 'ConfigMap'}:
            labels = manifest['metadata']['labels']
            assert (labels['release'], labels['team']) == ('kube-prometheus-stack', 'inference')


@pytest.mark.parametrize(
    ('feature', 'exporter_roles'),
    [('monitoring', {'head'}), ('gcs-fault-tolerance', {'head', 'worker'}), ('no-exporter', None)],
)
def test_what_is_scraped(feature: str, exporter_roles: set[str] | None) -> None:
    """Ray's metrics on every pod; the exporter where the router may be, so that no target is down for good."""
    found = monitors(feature)
    labels = {role: group['template']['metadata']['labels'] for role, group in groups(cluster(feature)).items()}

    def selected(monitor: Manifest) -> set[str]:
        wanted = monitor['selector']['matchLabels'].items()
        return {role for role, pod in labels.items() if wanted <= pod.items()}

    ray = found.pop('llm-replayssm-ray')
    assert selected(ray) == {'head', 'worker'}
    assert [endpoint['port'] for endpoint in ray['podMetricsEndpoints']] == ['metrics']
    if exporter_roles is None:
        assert not found
        return
    (exporter,) = found.values()
    assert selected(exporter) == exporter_roles
    assert [endpoint['port'] for endpoint in exporter['podMetricsEndpoints']] == ['exporter']


def test_rules_are_those_of_the_file() -> None:
    expected = yaml.safe_load((CHART / 'files/rules.yaml').read_text())
    assert one('PrometheusRule', 'monitoring')['spec'] == expected


def with_files(folder: Path, files: dict[str, str]) -> Path:
    copy = folder / 'replayssm'
    shutil.copytree(CHART, copy)
    shutil.rmtree(copy / 'files')
    for name, text in files.items():
        path = copy / 'files' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return copy


def test_templates_of_alerts_and_dashboards_are_left_to_prometheus_and_grafana(tmp_path: Path) -> None:
    alert = {'alert': 'A', 'expr': 'up == 0', 'annotations': {'summary': '{{ $labels.replica }} is at {{ $value }}'}}
    rules = {'groups': [{'name': 'g', 'rules': [alert]}]}
    dashboard = {'title': 'State memory', 'panels': [{'legendFormat': '{{rank}}', 'expr': 'a{b="\\\\d"}'}]}
    name = 'state_memory.json'
    chart = with_files(
        tmp_path, {'rules.yaml': yaml.safe_dump(rules), f'dashboards/{name}': json.dumps(dashboard, indent=2)}
    )
    assert one('PrometheusRule', 'monitoring', chart=chart)['spec'] == rules
    config_map = one('ConfigMap', 'monitoring', chart=chart)
    assert json.loads(config_map['data'][name]) == dashboard
    assert config_map['metadata']['name'] == 'llm-replayssm-state-memory'
    assert config_map['metadata']['labels']['grafana_dashboard'] == '1'


def test_dashboards_that_are_not_there_are_no_error(tmp_path: Path) -> None:
    chart = with_files(tmp_path, {'rules.yaml': 'groups: []\n'})
    assert 'kind: ConfigMap' not in template('monitoring', chart=chart)


@pytest.mark.parametrize('version', HELMS)
def test_the_files_of_the_chart_are_packed_with_it(version: str, tmp_path: Path) -> None:
    """Helm packs no symbolic links, and files for tests stay out."""
    done = helm(version, 'package', str(CHART), '--destination', str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob('*.tgz')
    with tarfile.open(package) as archive:
        packed = {name.removeprefix('replayssm/') for name in archive.getnames()}
    files = {str(path.relative_to(CHART)) for path in (CHART / 'files').rglob('*') if path.is_file()}
    assert 'files/rules.yaml' in files
    assert files | {'values.schema.json', 'README.md'} <= packed
    assert not [name for name in packed if name.startswith('ci/')]
