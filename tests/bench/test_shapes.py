"""Shapes of the models that benchmarks run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from replayssm.plan import SHAPES, load_shape
from tests.bench.shapes import MODELS, write_config


@pytest.mark.parametrize('model', MODELS)
def test_whole_models_have_the_planned_shape(model: str, tmp_path: Path) -> None:
    write_config(tmp_path, model)
    assert load_shape(str(tmp_path)) == SHAPES[model]


def test_a_shard_of_some_layers(tmp_path: Path) -> None:
    config = write_config(tmp_path, 'glm-5.3-flash', layers=4, shard=4, fp8=True)
    shape = load_shape(str(tmp_path))
    assert (shape.linear_layers, shape.attention_layers, shape.key_heads) == (3, 1, 16)
    text = config['text_config']
    assert (text['moe_intermediate_size'], text['intermediate_size'], text['hidden_size']) == (512, 3072, 4096)
    assert config['quantization_config']['weight_block_size'] == [128, 128]


def test_what_cannot_be_divided_or_cut(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='shard: expected a divisor of linear_num_key_heads=16, got 3'):
        write_config(tmp_path, 'qwen3.5-35b-a3b', shard=3)
    with pytest.raises(ValueError, match='layers: expected at most 45, got 46'):
        write_config(tmp_path, 'glm-5.3-flash', layers=46)
