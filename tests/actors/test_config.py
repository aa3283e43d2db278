"""The deployment's arguments and whole Serve config files: what is wrong is named, and what was meant is offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from actors.config import AppConfig, FixesOptions
from actors.config_error import ConfigError
from actors.serve_file import load
from replayssm import demo
from replayssm.patch import Fixes

DEPLOY = Path(__file__).parents[2] / 'deploy'
MODEL = {'name': 'demo', 'demo': 'tiny'}


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        pytest.param({'model': MODEL, 'engin': {}}, "engin: unknown key; did you mean 'engine'?", id='section'),
        pytest.param(
            {'model': MODEL, 'engine': {'sesion_len': 9}},
            "engine.sesion_len: unknown key; did you mean 'session_len'?",
            id='key',
        ),
        pytest.param(
            {'model': MODEL, 'engine': {'replay': {'bufer_len': 8}}},
            "engine.replay.bufer_len: unknown key; did you mean 'buffer_len'?",
            id='nested-key',
        ),
        pytest.param({'model': MODEL, 'tp': 4}, "tp: unknown key; 'tp' belongs to engine", id='misplaced-key'),
        pytest.param({'model': MODEL, 'xyzzy': 4}, 'xyzzy: unknown key; valid keys: api, engine, ', id='unlike-any'),
        pytest.param({'model': MODEL, 'engine': {'tp': 0}}, 'engine.tp: got 0; ', id='out-of-range'),
        pytest.param({'model': MODEL, 'engine': {'dtype': 'fp8'}}, "engine.dtype: got 'fp8'; ", id='not-a-choice'),
        pytest.param(
            {'model': MODEL, 'api': {'api_keys_file': 'keys'}},
            "api.api_keys_file: got 'keys'; use an absolute path",
            id='relative-path',
        ),
        pytest.param(
            {'model': MODEL, 'worker': {'replicas': 2, 'autoscaling': {'max_replicas': 4}}},
            'worker: replicas is 2 beside autoscaling; leave one of them out',
            id='two-numbers-of-replicas',
        ),
        pytest.param(
            {'model': MODEL, 'worker': {'autoscaling': {'min_replicas': 3, 'max_replicas': 2}}},
            'worker.autoscaling: max_replicas is 2; give at least min_replicas=3',
            id='most-below-least',
        ),
        pytest.param(
            {'model': MODEL, 'engine': {'speculative': {'num_tokens': 2, 'accepted': [0.5, 0.5]}}},
            'engine.speculative: accepted: got (0.5, 0.5); give 3 shares, not all zero',
            id='shares-of-other-drafts',
        ),
        pytest.param({'model': {'name': 'x'}}, 'set exactly one of them', id='no-checkpoint'),
        pytest.param({}, 'model: required, but not given', id='no-model'),
        pytest.param(
            {'model': MODEL, 'engine': {'device': 'cpu'}}, 'num_gpu_blocks is 0 on device cpu', id='cpu-without-blocks'
        ),
        pytest.param(
            {'model': MODEL, 'engine': {'dtype': 'float32'}}, "dtype is 'float32' on device cuda", id='cuda-float32'
        ),
        pytest.param({'model': MODEL, 'engine': {'block_size': 48}}, 'use a power of two', id='block-size'),
        pytest.param(
            {'model': MODEL, 'engine': {'fixes': {'continuation': False}}},
            'fixes.continuation: expected True with ReplaySSM enabled, got False',
            id='replay-unfixed',
        ),
        pytest.param(
            {'model': MODEL, 'engine': {'speculative': {'num_tokens': 3}, 'replay': {'buffer_len': 3}}},
            'replay.buffer_len is 3; verifying 4 tokens needs 4',
            id='window-over-buffer',
        ),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.model_validate(args)
    assert message in str(caught.value)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.model_validate({'model': MODEL, 'engine': {'tp': 0}, 'ruoter': {}})
    assert len(str(caught.value).splitlines()) == 2


def test_serve_passes_the_typed_model_to_the_builder() -> None:
    from actors.app import build_app

    with pytest.raises(ConfigError, match='belongs to engine'):
        call_user_app_builder_with_args_if_necessary(build_app, {'model': MODEL, 'tp': 4})


def test_options_match_those_of_the_mechanism() -> None:
    assert set(FixesOptions.model_fields) == set(Fixes.__dataclass_fields__)
    for name in demo.names():
        AppConfig.model_validate({'model': {'name': 'x', 'demo': name}})


@pytest.mark.parametrize('path', sorted(DEPLOY.glob('*.yaml')), ids=lambda path: path.name)
def test_shipped_files_are_valid(path: Path) -> None:
    load(path)


@pytest.mark.parametrize(
    ('edit', 'message'),
    [
        pytest.param({'http_option': {}}, "http_option: unknown key; did you mean 'http_options'", id='top-level'),
        pytest.param({'applications': [{'argz': {}}]}, "argz: unknown key; did you mean 'args'?", id='application'),
        pytest.param(
            {'applications': [{'deployments': [{'name': 'Worker', 'num_replica': 2}]}]},
            "deployments[0].num_replica: unknown key; did you mean 'num_replicas'",
            id='deployment',
        ),
        pytest.param(
            {'applications': [{'deployments': [{'name': 'Workers'}]}]},
            "no deployment 'Workers'; did you mean 'Worker'?",
            id='deployment-name',
        ),
        pytest.param(
            {'applications': [{'deployments': [{'name': 'Worker', 'ray_actor_options': {'num_gpu': 1}}]}]},
            "ray_actor_options.num_gpu: unknown key; did you mean 'num_gpus'",
            id='actor-option',
        ),
        pytest.param({'applications': []}, 'expected one application, got 0', id='no-application'),
    ],
)
def test_wrong_files_are_named(edit: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = yaml.safe_load((DEPLOY / 'local.yaml').read_text())
    applications = edit.pop('applications', None)
    data.update(edit)
    if applications is not None:
        data['applications'] = [{**data['applications'][0], **changes} for changes in applications]
    path = tmp_path / 'serve.yaml'
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert message in str(caught.value)
