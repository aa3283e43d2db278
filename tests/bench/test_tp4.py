"""The benchmark of a tensor-parallel deployment: its plan, its comparison, and a dry run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from actors.config import AppConfig
from tests.bench.tp4.arms import Arm, Options, plan
from tests.bench.tp4.report import compare, lines

ROOT = Path(__file__).parents[2]
ALL = {'greedy', 'recovery', 'target', 'mtp3'}


@pytest.mark.parametrize('model', ['glm', 'qwen'])
def test_every_arm_is_a_valid_configuration(model: str, tmp_path: Path) -> None:
    options = Options(ROOT / 'deploy/glm_tp4.yaml', 2, 4, model, 'cuda', tmp_path)  # type: ignore[arg-type]
    arms = list(plan(options, ALL, rounds=2))
    assert [arm.name for arm in arms] == [
        *('greedy-tp1', 'greedy-tp2', 'target-off-r1', 'target-on-r1', 'mtp3-on-r1', 'mtp3-off-r1'),
        *('target-off-r2', 'target-on-r2', 'mtp3-on-r2', 'mtp3-off-r2'),
    ]
    configs = {arm.name: AppConfig.model_validate(arm.args) for arm in arms}
    assert all(config.model.random_weights for config in configs.values())
    assert (configs['greedy-tp1'].engine.tp, configs['greedy-tp2'].engine.tp) == (1, 2)
    off, on = configs['mtp3-off-r1'].engine, configs['mtp3-on-r1'].engine
    assert (off.replay.enabled, on.replay.enabled) == (False, True)
    assert off.num_gpu_blocks == on.num_gpu_blocks >= 64 * (1024 + 256) // 64
    assert on.patch_settings().accepted_drafts == (0.1, 0.1, 0.1, 0.7)


@pytest.mark.parametrize(('model', 'count'), [('glm', 'n_routed_experts'), ('qwen', 'num_experts')])
def test_few_experts_are_all_chosen(model: str, count: str, tmp_path: Path) -> None:
    options = Options(ROOT / 'deploy/glm_tp4.yaml', 2, 4, model, 'cuda', tmp_path, experts=8)  # type: ignore[arg-type]
    assert list(plan(options, {'greedy'}, rounds=1))
    text = json.loads((tmp_path / 'model/config.json').read_text())['text_config']
    assert text[count] == text['num_experts_per_tok'] == 8


def test_arms_survive_their_file(tmp_path: Path) -> None:
    arm = Arm('a', 'load', {'model': {'name': 'x'}}, 4, 8, 8, 100)
    (tmp_path / 'arm').write_text(arm.dump())
    assert Arm.read(tmp_path / 'arm') == arm


def test_answers_are_compared_up_to_where_they_part() -> None:
    ours = {'prompt': [1], 'tokens': [5, 6, 7, 8], 'logprobs': [{'5': -1.0}, {'6': -1.0}, {'7': -9.0}, {'8': 0.0}]}
    theirs = {
        'prompt': [1],
        'tokens': [5, 6, 9, 8],
        'logprobs': [{'5': -1.5}, {'6': -1.0}, {'9': -1.0, '7': -1.25}, {'8': -5.0}],
    }
    (row,) = compare([ours], [theirs])
    assert row == {
        'prompt_tokens': 1,
        'first_difference': 2,
        'margin_there': 0.25,
        'equal_share': 0.75,
        'logprob_max_difference': 0.5,
        'logprob_mean_difference': 0.25,
    }


@pytest.mark.soak
def test_dry_run(tmp_path: Path) -> None:
    command = [sys.executable, '-m', 'tests.bench.tp4', 'run', '--config', 'deploy/local_glm_tp4.yaml']
    command += ['--device', 'cpu', '--tp', '2', '--out', str(tmp_path), '--batch-target', '8', '--batch-mtp', '4']
    command += ['--tokens-in', '24', '--tokens-out', '24']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob('*.json')}
    assert len(results) == 6
    assert results['greedy-tp2']['recovery']['same_answer']
    assert all(result['ranks_in_place'] for result in results.values())
    assert sum(results['mtp3-on-r1']['accepted_drafts'][1:]) > 0
    assert 'mtp3 | 1+1 | ' in '\n'.join(lines(list(results.values())))
