"""Which checkpoints may take another one's place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.checkpoint import Checkpoint, CheckpointMismatch
from replayssm import demo

SPEC = demo.SPECS['tiny']


@pytest.fixture(scope='module')
def present() -> Checkpoint:
    return Checkpoint.read(str(demo.ensure('tiny')))


def test_other_weights_fit(present: Checkpoint, tmp_path: Path) -> None:
    demo.write(replace(SPEC, seed=5), 'float32', tmp_path)
    present.require_same_architecture(Checkpoint.read(str(tmp_path)))


@pytest.mark.parametrize(
    ('spec', 'dtype', 'message'),
    [
        pytest.param(
            replace(SPEC, intermediate_size=128),
            'float32',
            r'config\.json: text_config\.intermediate_size is 128, expected 256',
            id='size',
        ),
        pytest.param(SPEC, 'bfloat16', r'config\.json: .*dtype is bfloat16, expected float32', id='dtype'),
    ],
)
def test_another_architecture_is_named(
    present: Checkpoint, tmp_path: Path, spec: demo.DemoSpec, dtype: demo.CheckpointDtype, message: str
) -> None:
    demo.write(spec, dtype, tmp_path)
    with pytest.raises(CheckpointMismatch, match=message):
        present.require_same_architecture(Checkpoint.read(str(tmp_path)))


def test_missing_tensors_are_named(present: Checkpoint) -> None:
    shapes = {name: shape for name, shape in present.shapes.items() if not name.startswith('mtp.')}
    with pytest.raises(CheckpointMismatch, match=r'a tensor: mtp\.fc\.weight is None, expected \(128, 256\)'):
        present.require_same_architecture(replace(present, shapes=shapes))


def test_what_says_nothing_of_the_architecture_may_differ(present: Checkpoint, tmp_path: Path) -> None:
    demo.write(SPEC, 'float32', tmp_path)
    path = tmp_path / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'transformers_version': 'other'}))
    present.require_same_architecture(Checkpoint.read(str(tmp_path)))


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=f"path: got '{tmp_path}'; no checkpoint there"):
        Checkpoint.read(str(tmp_path))
