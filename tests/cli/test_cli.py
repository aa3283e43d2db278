from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replayssm import demo
from replayssm.cli import app

runner = CliRunner()


def test_plan_prints_a_table() -> None:
    result = runner.invoke(app, ['plan', '--drafts', '3'])
    assert result.exit_code == 0, result.output
    assert 'checkpoint, per slot' in result.output
    assert 'KV-cache blocks' in result.output


def test_plan_as_json_adds_up() -> None:
    result = runner.invoke(app, ['plan', '--json', '--max-batch-size', '8', '--tp', '2'])
    plan = json.loads(result.output)
    assert plan['slots'] == 10
    assert plan['replay_bytes'] == 10 * sum(plan['replay_slot_bytes'].values())
    assert plan['kv_blocks_gained'] > 0


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        pytest.param(['plan', 'nonsense'], 'qwen3.5-9b', id='unknown model'),
        pytest.param(['plan', '--buffer-len', '99'], 'expected 1..32', id='buffer too long'),
        pytest.param(['plan', '--checkpoint-dtype', 'int8'], "'int8'", id='unknown dtype'),
        pytest.param(['demo-model', 'nonsense'], 'small, tiny', id='unknown demo model'),
        pytest.param(['demo-model', 'tiny', '--dtype', 'int8'], 'float32', id='unknown demo dtype'),
    ],
)
def test_bad_values_are_refused_with_what_is_possible(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert message in ' '.join(result.output.split())


def test_demo_model_prints_the_folder_it_wrote(tmp_path: Path) -> None:
    result = runner.invoke(app, ['demo-model', 'tiny', '--cache-dir', str(tmp_path)])
    folder = Path(result.output.strip())
    assert folder.parent == tmp_path
    assert (folder / 'config.json').is_file()


def test_demo_model_is_the_trained_one_where_none_is_named() -> None:
    result = runner.invoke(app, ['demo-model'])
    assert Path(result.output.strip()) == demo.TRAINED['small']
