"""The schema of values is strict, and README and schema follow values.yaml and the application's configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

import replayssm
from helm.readme import readme
from helm.schema import schema
from tests.helm.chart import CHART, CI_FILES, HELMS, helm, refusal, schema_of_values, template

OPEN = {'global', 'extraManifests', 'io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1'}
"""Whose content is up to others."""


def objects(schema: Any, path: str = '') -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every schema of an object with its path."""
    if isinstance(schema, Mapping):
        if schema.get('type') in ('object', ['object', 'null']) or isinstance(schema.get('properties'), Mapping):
            yield path, schema
        for key, value in schema.items():
            if key not in OPEN:
                yield from objects(value, f'{path}/{key}')
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from objects(value, f'{path}/{index}')


def test_every_object_is_closed() -> None:
    """`additionalProperties` is false, or the type of the values of a map."""
    found = dict(objects(schema_of_values()))
    assert len(found) > 100
    assert [path for path, schema in found.items() if schema.get('additionalProperties', True) is True] == []


@pytest.mark.parametrize('version', HELMS)
def test_a_misspelt_key_is_refused_by_name(version: str) -> None:
    done = helm(version, 'template', 'llm', str(CHART), '--set', 'replicCount=3')
    assert done.returncode != 0
    assert 'replicCount' in done.stderr


@pytest.mark.parametrize('version', HELMS)
@pytest.mark.parametrize(
    ('setting', 'key'),
    [
        ('config.engine.tpp=4', 'tpp'),
        ('config.engine.replay.bufer_len=16', 'bufer_len'),
        ('config.worker.replica=2', 'replica'),
        ('worker.resources.limit={"cpu": 1}', 'limit'),
        ('worker.tolerations=[{"kee": "gpu"}]', 'kee'),
        ('worker.affinity={"nodeAfinity": {}}', 'nodeAfinity'),
        ('env=[{"name": "A", "vaule": "b"}]', 'vaule'),
        ('monitoring.podMonitors.intervall="15s"', 'intervall'),
        ('networkPolicy.apiFrom=[{"podSelektor": {}}]', 'podSelektor'),
        ('httpRoute.parentRefs=[{"name": "a", "nmespace": "b"}]', 'nmespace'),
        ('probes.liveness.period=3', 'period'),
    ],
)
def test_misspelt_keys_are_refused_at_any_depth(setting: str, key: str, version: str) -> None:
    assert key in refusal(setting, version=version)


@pytest.mark.parametrize(
    ('setting', 'where'),
    [
        ('config.engine.tp=0', 'tp'),
        ('config.engine.tp="four"', 'tp'),
        ('config.engine=null', 'engine'),
        ('config.worker.replicas=null', 'replicas'),
        ('upgradeStrategy.type="Rolling"', 'upgradeStrategy'),
        ('modelCache.type="nfs"', 'modelCache'),
        ('head.sharedMemory="two gigabytes"', 'sharedMemory'),
        ('serve.port=70000', 'port'),
        ('fullnameOverride="' + 'a' * 48 + '"', 'fullnameOverride'),
        ('auth.apiKeys=["two words"]', 'apiKeys'),
    ],
)
def test_values_out_of_range_are_refused_by_name(setting: str, where: str) -> None:
    assert where in refusal(setting)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (['config.model.demo="tiny"'], 'config.model: set exactly one of path and demo'),
        (['config.model.path=null'], 'config.model: set exactly one of path and demo'),
        (['upgradeStrategy.type="NewClusterWithIncrementalUpgrade"'], 'needs config.worker.autoscaling'),
        (
            ['upgradeStrategy.type="NewClusterWithIncrementalUpgrade"', 'config.worker.autoscaling.max_replicas=2'],
            'upgradeStrategy.gatewayClassName',
        ),
        (['gcsFaultTolerance.enabled=true'], 'gcsFaultTolerance.redisAddress'),
        (['ingress.enabled=true'], 'ingress.hosts'),
        (['httpRoute.enabled=true'], 'httpRoute.parentRefs'),
        (['worker.resources.limits={"nvidia.com/gpu": 2}'], 'worker.resources.limits: leave out nvidia.com/gpu'),
    ],
)
def test_what_cannot_work_together_is_refused_with_a_reason(settings: list[str], message: str) -> None:
    assert message in refusal(*settings)


def test_a_name_that_kuberay_refuses_is_refused_at_once() -> None:
    assert 'begin with a letter' in refusal(release='2nd')
    assert template('default', 'fullnameOverride="second"', release='2nd')


def test_an_upgrade_in_steps_leaves_no_room_for_another_route() -> None:
    route = ['httpRoute={"enabled": true, "parentRefs": [{"name": "a"}]}']
    assert 'disable ingress and httpRoute' in refusal(*route, feature='incremental-upgrade')


def test_a_parent_chart_may_pass_its_global_values() -> None:
    assert template('default', 'global={"registry": "a"}') == template('default')


def test_the_schema_is_the_generated_one() -> None:
    assert (CHART / 'values.schema.json').read_text() == schema(), 'run `make docs`'


def test_the_readme_is_the_generated_one() -> None:
    text = (CHART / 'README.md').read_text()
    assert text == readme(text), 'run `make docs`'


def test_every_section_and_key_has_a_meaning() -> None:
    rows = re.findall(r'^\| `([\w.]+)` \| .* \| (.*) \|$', (CHART / 'README.md').read_text(), re.MULTILINE)
    assert len(rows) > 100
    assert [key for key, meaning in rows if not meaning] == []


def test_every_values_file_is_of_use() -> None:
    """Each under ci/ but the default one changes what is rendered."""
    assert len(CI_FILES) >= 25
    same = [feature for feature in CI_FILES if template(feature) == template('default')]
    assert same == ['default']


def test_the_chart_has_the_version_of_the_package_and_no_dependencies() -> None:
    chart = yaml.safe_load((CHART / 'Chart.yaml').read_text())
    assert chart['appVersion'] == replayssm.__version__
    assert 'dependencies' not in chart
    assert not (CHART / 'charts').exists()
