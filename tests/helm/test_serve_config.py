"""What the chart hands to Ray Serve: parsed by Serve, by the application, and deployed on a real Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from actors import serve_file
from actors.config import AppConfig
from tests.helm.chart import CI_FILES, ROOT, cluster, groups, serve_config
from tests.patience import LIVENESS_S
from tests.ports import free_port


@pytest.mark.parametrize('feature', CI_FILES)
def test_serve_and_the_application_accept_it(feature: str, tmp_path: Path) -> None:
    config = serve_config(feature)
    ServeDeploySchema.model_validate(config)
    path = tmp_path / 'serve.yaml'
    path.write_text(yaml.safe_dump(config))
    _, args = serve_file.load(path)
    assert args.placement.wait_for_nodes, 'the operator submits the application before there are workers'


def test_arguments_are_those_of_the_values() -> None:
    args = AppConfig.model_validate(serve_config('replay')['applications'][0]['args'])
    assert args.engine.replay.buffer_len == 32
    assert args.engine.replay.record_dtype == 'bfloat16'
    assert args.engine.speculative is not None
    assert args.engine.speculative.num_tokens == 4


def test_drafts_can_be_switched_off() -> None:
    args = AppConfig.model_validate(serve_config('no-drafts')['applications'][0]['args'])
    assert args.engine.speculative is None


def test_large_numbers_stay_whole() -> None:
    engine = serve_config('large-numbers')['applications'][0]['args']['engine']
    assert (engine['session_len'], engine['max_prefill_token_num']) == (1_000_000, 1_048_576)


def test_the_api_listens_where_the_service_looks_for_it() -> None:
    http = serve_config('network-policy')['http_options']
    assert (http['host'], http['port']) == ('0.0.0.0', 9000)


def overrides(feature: str) -> dict[str, dict[str, Any]]:
    return {entry['name']: entry for entry in serve_config(feature)['applications'][0].get('deployments', ())}


def test_the_router_stays_on_the_head_so_that_one_pod_is_scraped() -> None:
    wanted = overrides('default')['Router']['ray_actor_options']['resources']
    offered = groups(cluster('default'))['head']['rayStartParams']['resources']
    # As the shell that KubeRay starts `ray` with reads it.
    assert json.loads(json.loads(offered)) == wanted
    assert 'resources' not in groups(cluster('default'))['worker']['rayStartParams']


def test_the_router_leaves_a_head_that_may_go_away() -> None:
    assert overrides('gcs-fault-tolerance') == {}
    assert 'resources' not in groups(cluster('gcs-fault-tolerance'))['head']['rayStartParams']


def test_autoscaling_stands_for_the_number_of_replicas() -> None:
    worker = AppConfig.model_validate(serve_config('autoscaling')['applications'][0]['args']).worker
    assert worker.autoscaling is not None
    assert (worker.autoscaling.min_replicas, worker.max_replicas) == (2, 6)


@pytest.mark.soak
def test_a_real_ray_serves_it() -> None:
    """With the resources of one head and one worker pod.

    When Serve calls the application running, KubeRay may send traffic: the model has to be there.
    """
    sets = [
        f'serve.port={free_port()}',
        f'config.metrics.port={free_port()}',
        'config.worker.autoscaling={"min_replicas": 1, "max_replicas": 1}',
    ]
    roles = {role: group['rayStartParams'] for role, group in groups(cluster('cpu', *sets)).items()}
    done = subprocess.run(
        [sys.executable, '-m', 'tests.helm.deploy'],
        cwd=ROOT,
        input=json.dumps({'config': serve_config('cpu', *sets), **roles}),
        capture_output=True,
        text=True,
        timeout=LIVENESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(said['ready'])['status'] == 'ready'
    assert json.loads(said['answer'])['usage']['completion_tokens'] >= 1
    assert 'replayssm_requests_finished_total' in said['metrics']
