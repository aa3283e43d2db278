"""What the rendered manifests mean, together."""

from __future__ import annotations

import base64
import math
import re
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from actors.config import AppConfig
from tests.helm.chart import (
    CHART,
    CI_FILES,
    Manifest,
    cluster,
    container,
    groups,
    manifests,
    notes,
    one,
    pods,
    serve_config,
    template,
)

ROUTER_CPUS = 0.1


@pytest.mark.parametrize('tp', [1, 2, 8])
def test_a_worker_pod_has_the_gpus_of_one_engine(tp: int) -> None:
    specs = pods('default', f'config.engine.tp={tp}')
    resources = container(specs['worker'])['resources']
    assert resources['limits']['nvidia.com/gpu'] == resources['requests']['nvidia.com/gpu'] == tp
    assert 'nvidia.com/gpu' not in str(container(specs['head'])['resources'])


def test_gpus_have_the_name_that_the_cluster_gives_them() -> None:
    resources = container(pods('default', 'worker.gpuResource="nvidia.com/mig-3g.71gb"')['worker'])['resources']
    assert resources['limits'] == {'memory': '64Gi', 'nvidia.com/mig-3g.71gb': 1}


@pytest.mark.parametrize(('feature', 'ranks'), [('cpu', None), ('cpu-ranks', '"{\\"REPLAYSSM_CPU_RANK\\":4}"')])
def test_on_cpus_ranks_are_counted_instead(feature: str, ranks: str | None) -> None:
    assert 'gpu' not in str(container(pods(feature)['worker'])['resources'])
    assert groups(cluster(feature))['worker']['rayStartParams'].get('resources') == ranks


def test_there_are_as_many_worker_pods_as_engines() -> None:
    worker = groups(cluster('tensor-parallel'))['worker']
    assert (worker['replicas'], worker['minReplicas'], worker['maxReplicas']) == (3, 3, 3)


def test_the_autoscaler_has_its_bounds() -> None:
    worker = groups(cluster('autoscaling'))['worker']
    assert (worker['replicas'], worker['minReplicas'], worker['maxReplicas']) == (2, 2, 6)
    assert cluster('autoscaling')['enableInTreeAutoscaling'] is True
    assert 'enableInTreeAutoscaling' not in cluster()


def test_the_least_number_of_engines_is_the_applications() -> None:
    args = AppConfig.model_validate(serve_config('incremental-upgrade')['applications'][0]['args'])
    assert args.worker.autoscaling is not None
    assert groups(cluster('incremental-upgrade'))['worker']['minReplicas'] == args.worker.autoscaling.min_replicas


@pytest.mark.parametrize('feature', CI_FILES)
def test_every_worker_pod_has_cpus_for_its_engine_and_all_small_deployments(feature: str) -> None:
    args = serve_config(feature)['applications'][0]['args']
    small = args['api']['replicas'] * args['api']['num_cpus'] + ROUTER_CPUS
    roles = groups(cluster(feature))
    assert roles['worker']['rayStartParams']['num-cpus'] == str(math.ceil(args['worker']['num_cpus'] + small))
    assert roles['head']['rayStartParams']['num-cpus'] == '0'


def test_ray_has_the_version_of_the_image() -> None:
    assert cluster()['rayVersion'] == metadata.version('ray')


@pytest.mark.parametrize('feature', CI_FILES)
def test_pods_are_found_by_what_selects_them(feature: str) -> None:
    labels = {role: group['template']['metadata']['labels'] for role, group in groups(cluster(feature)).items()}
    for manifest in manifests(feature):
        spec = manifest.get('spec', {})
        selector = spec.get('podSelector') or spec.get('selector')
        if selector and manifest['kind'] in ('NetworkPolicy', 'PodDisruptionBudget', 'PodMonitor'):
            wanted = selector['matchLabels'].items()
            assert [role for role, found in labels.items() if wanted <= found.items()], manifest['kind']


@pytest.mark.parametrize('feature', CI_FILES)
def test_pods_run_without_privileges(feature: str) -> None:
    for pod in pods(feature).values():
        assert pod['securityContext']['runAsNonRoot'] is True
        assert pod['securityContext']['seccompProfile'] == {'type': 'RuntimeDefault'}
        assert container(pod)['securityContext'] == {
            'allowPrivilegeEscalation': False,
            'capabilities': {'drop': ['ALL']},
        }
        assert not pod.get('hostNetwork')


def test_only_the_autoscaler_may_talk_to_kubernetes() -> None:
    tokens = {role: pod['automountServiceAccountToken'] for role, pod in pods().items()}
    assert tokens == {'head': False, 'worker': False}
    tokens = {role: pod['automountServiceAccountToken'] for role, pod in pods('autoscaling').items()}
    assert tokens == {'head': True, 'worker': False}


def test_a_new_chart_version_does_not_restart_the_cluster(tmp_path: Path) -> None:
    """KubeRay starts a new cluster whenever anything in its description changes."""
    copy = tmp_path / 'replayssm'
    shutil.copytree(CHART, copy)
    metadata = yaml.safe_load((copy / 'Chart.yaml').read_text())
    (copy / 'Chart.yaml').write_text(yaml.safe_dump(metadata | {'version': '9.9.9'}))
    assert cluster(chart=copy) == cluster()
    assert one('RayService', chart=copy)['metadata'] != one('RayService')['metadata']


@pytest.mark.parametrize(
    'release', ['r', 'replayssm', 'team.llm', 'x' * 53, 'production-inference-of-the-second-largest-customer']
)
def test_names_are_short_enough_for_what_is_made_of_them(release: str) -> None:
    found = manifests('monitoring', release=release) + manifests('disruption-budget', release=release)
    assert max(len(manifest['metadata']['name']) for manifest in found) <= 63
    name = one('RayService', release=release)['metadata']['name']
    assert len(name) <= 47
    assert name == one('RayService', 'default', release=release)['metadata']['name']
    assert re.fullmatch('[a-z]([-a-z0-9]*[a-z0-9])?', name)


def test_the_name_is_not_doubled() -> None:
    assert one('RayService', release='replayssm')['metadata']['name'] == 'replayssm'
    assert one('RayService', release='llm')['metadata']['name'] == 'llm-replayssm'


def test_keys_reach_the_pods_as_files_and_are_printed_nowhere_else(tmp_path: Path) -> None:
    secrets = ['sk-first-caller', 'sk-second-caller', 'administrators-only']
    secret = one('Secret', 'api-keys')
    rest = [str(manifest) for manifest in manifests('api-keys') if manifest['kind'] != 'Secret']
    printed = notes(tmp_path, 'api-keys')
    for text in secrets:
        encoded = base64.b64encode(text.encode()).decode()
        assert not [manifest for manifest in rest if text in manifest or encoded in manifest]
        assert text not in printed
    assert base64.b64decode(secret['data']['api-keys']).decode().split() == secrets[:2]
    assert base64.b64decode(secret['data']['admin-token']).decode().split() == secrets[2:]


@pytest.mark.parametrize(
    ('feature', 'entries'),
    [('api-keys', {'api-keys', 'admin-token'}), ('existing-secret', {'keys.txt', 'admin.txt'})],
)
def test_the_application_reads_keys_where_they_are_mounted(feature: str, entries: set[str]) -> None:
    api = serve_config(feature)['applications'][0]['args']['api']
    paths = {Path(api['api_keys_file']), Path(api['admin_token_file'])}
    assert {path.name for path in paths} == entries
    for pod in pods(feature).values():
        (mount,) = [mount for mount in container(pod)['volumeMounts'] if mount['name'] == 'auth']
        assert {Path(mount['mountPath'])} == {path.parent for path in paths}
        # A file mounted by itself would never change.
        assert 'subPath' not in mount
        (volume,) = [volume for volume in pod['volumes'] if volume['name'] == 'auth']
        if feature == 'api-keys':
            assert volume['secret']['secretName'] == one('Secret', feature)['metadata']['name']
        else:
            assert volume['secret']['secretName'] == 'callers'


def test_an_existing_secret_is_not_made_again() -> None:
    assert 'Secret' not in {manifest['kind'] for manifest in manifests('existing-secret')}
    assert 'Secret' not in {manifest['kind'] for manifest in manifests()}


def test_the_redis_password_is_a_reference() -> None:
    options = cluster('gcs-fault-tolerance')['gcsFaultToleranceOptions']
    assert options['redisPassword']['valueFrom']['secretKeyRef'] == {'name': 'redis', 'key': 'redis-password'}
    assert options['redisAddress'] == 'redis.data.svc:6379'


@pytest.mark.parametrize('feature', CI_FILES)
def test_every_mount_has_its_volume_and_shared_memory_is_memory(feature: str) -> None:
    for pod in pods(feature).values():
        mounts = {mount['name']: mount['mountPath'] for mount in container(pod)['volumeMounts']}
        volumes = {volume['name']: volume for volume in pod['volumes']}
        assert set(mounts) == set(volumes)
        assert mounts['shared-mem'] == '/dev/shm'
        assert volumes['shared-mem']['emptyDir']['medium'] == 'Memory'


@pytest.mark.parametrize(
    ('feature', 'volume'),
    [
        ('default', {'emptyDir': {'sizeLimit': '200Gi'}}),
        ('model-claim', {'persistentVolumeClaim': {'claimName': 'llm-replayssm-models'}}),
        ('model-existing-claim', {'persistentVolumeClaim': {'claimName': 'checkpoints'}}),
        ('model-host-path', {'hostPath': {'path': '/srv/models', 'type': 'Directory'}}),
    ],
)
def test_checkpoints_are_kept_where_asked(feature: str, volume: Manifest) -> None:
    for pod in pods(feature).values():
        assert {'name': 'models', **volume} in pod['volumes']
    claims = [manifest for manifest in manifests(feature) if manifest['kind'] == 'PersistentVolumeClaim']
    assert [claim['metadata']['name'] for claim in claims] == (
        ['llm-replayssm-models'] if feature == 'model-claim' else []
    )


def test_budgets_leave_all_but_one_worker() -> None:
    budgets = {
        manifest['metadata']['name']: manifest['spec']['minAvailable']
        for manifest in manifests('disruption-budget')
        if manifest['kind'] == 'PodDisruptionBudget'
    }
    assert budgets == {'llm-replayssm-head': 1, 'llm-replayssm-worker': 3}
    assert 'maxUnavailable' not in template('disruption-budget'), 'Ray pods have no controller that it works with'


def test_an_upgrade_in_steps_has_its_options() -> None:
    strategy = one('RayService', 'incremental-upgrade')['spec']['upgradeStrategy']
    assert strategy == {
        'type': 'NewClusterWithIncrementalUpgrade',
        'clusterUpgradeOptions': {
            'gatewayClassName': 'istio',
            'stepSizePercent': 20,
            'intervalSeconds': 60,
            'maxSurgePercent': 50,
        },
    }


def test_extra_manifests_are_rendered() -> None:
    extra = {m['metadata']['name']: m for m in manifests('extra-manifests') if m['kind'] == 'ConfigMap'}
    assert set(extra) == {'llm-notes', 'llm-replayssm-more'}
    assert extra['llm-notes']['data'] == {'model': 'qwen3.5'}


def test_scheduling_options_reach_the_right_pods() -> None:
    specs = pods('scheduling')
    assert specs['worker']['runtimeClassName'] == 'nvidia'
    assert specs['worker']['nodeSelector'] == {'nvidia.com/gpu.product': 'NVIDIA-H200'}
    assert specs['worker']['topologySpreadConstraints'][0]['topologyKey'] == 'topology.kubernetes.io/zone'
    assert specs['head']['nodeSelector'] == {'node-role/cpu': 'true'}
    assert 'runtimeClassName' not in specs['head']


def test_streams_may_end_before_a_pod_is_killed() -> None:
    for feature in ('default', 'tensor-parallel'):
        drain_s = AppConfig.model_validate(serve_config(feature)['applications'][0]['args']).worker.drain_timeout_s
        for pod in pods(feature).values():
            assert pod['terminationGracePeriodSeconds'] == drain_s + 30
            *command, given_s = container(pod)['lifecycle']['preStop']['exec']['command']
            assert (command, float(given_s)) == (['python', '-m', 'actors.drain', '--timeout-s'], drain_s)


@pytest.mark.parametrize('feature', CI_FILES)
def test_notes_can_be_printed(feature: str, tmp_path: Path) -> None:
    text = notes(tmp_path, feature)
    assert 'kubectl -n inference get rayservice' in text
    assert '-serve-svc' in text
    assert ('Bearer $KEY' in text) == (feature in ('api-keys', 'existing-secret'))
