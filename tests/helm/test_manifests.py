"""Every values file under ci/, with both helms: lint, and each manifest against the schema of its kind."""

from __future__ import annotations

import copy

import kubernetes_validate
import pytest

from tests.helm import crds
from tests.helm.chart import CHART, CI_FILES, HELMS, Manifest, helm, manifests, one, template

UNCHECKED_KINDS = {'HTTPRoute'}
"""Their definitions are at hand nowhere; test_behaviour.py looks at them."""


def check(manifest: Manifest) -> None:
    kind = manifest['kind']
    if kind in crds.FILES:
        crds.validator(kind, manifest['apiVersion'].partition('/')[2]).validate(manifest)
    elif kind not in UNCHECKED_KINDS:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize('version', HELMS)
@pytest.mark.parametrize('feature', CI_FILES)
def test_lint(feature: str, version: str) -> None:
    values = str(CHART / 'ci' / f'{feature}-values.yaml')
    done = helm(version, 'lint', '--strict', str(CHART), '--values', values)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'WARNING' not in done.stdout + done.stderr


@pytest.mark.parametrize('feature', CI_FILES)
def test_core_kinds_are_valid(feature: str) -> None:
    for manifest in manifests(feature):
        if manifest['kind'] not in crds.FILES:
            check(manifest)


@pytest.mark.parametrize('feature', CI_FILES)
def test_custom_kinds_are_valid(feature: str) -> None:
    custom = [manifest for manifest in manifests(feature) if manifest['kind'] in crds.FILES]
    assert 'RayService' in {manifest['kind'] for manifest in custom}
    for manifest in custom:
        check(manifest)


@pytest.mark.parametrize('feature', CI_FILES)
def test_both_helms_render_the_same(feature: str) -> None:
    assert manifests(feature, version='helm4') == manifests(feature, version='helm3')


@pytest.mark.parametrize('feature', CI_FILES)
def test_pods_are_valid_by_kubernetes_own_schema(feature: str) -> None:
    """KubeRay's definition leaves out much of what the API server checks when the pod is made."""
    cluster = one('RayService', feature)['spec']['rayClusterConfig']
    for group in (cluster['headGroupSpec'], *cluster['workerGroupSpecs']):
        metadata = group['template']['metadata'] | {'name': 'pod'}
        check({'apiVersion': 'v1', 'kind': 'Pod', 'metadata': metadata, 'spec': group['template']['spec']})


def test_schemas_refuse_unknown_fields() -> None:
    """Otherwise the tests above prove nothing."""
    service = copy.deepcopy(one('RayService'))
    service['spec']['rayClusterConfig']['headGroupSpec']['template']['spec']['tolerationz'] = []
    assert not crds.validator('RayService', 'v1').is_valid(service)
    account = one('ServiceAccount') | {'automountServiceAccountTokens': False}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(account)


@pytest.mark.parametrize('feature', CI_FILES)
def test_nothing_is_rendered_twice_or_outside_the_namespace(feature: str) -> None:
    found = manifests(feature)
    names = [(manifest['kind'], manifest['metadata']['name']) for manifest in found]
    assert len(set(names)) == len(names)
    ours = [manifest for manifest in found if manifest['metadata'].get('labels')]
    assert ours
    assert {manifest['metadata']['namespace'] for manifest in ours} == {'inference'}
    assert '<no value>' not in template(feature)
