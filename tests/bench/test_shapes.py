"""Shapes and random weights that benchmarks run on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from replayssm.plan import SHAPES, load_shape
from tests.bench.random_weights import STD, fill_random
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


def test_fp8_weights_times_their_scale_are_as_wide_as_the_others() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tensors = {
                'weight': torch.empty(3, 128, 128, dtype=torch.float8_e4m3fn),
                'weight_scale_inv': torch.empty(3, 1, 1),
                'plain': torch.empty(256, 128),
                'e_score_correction_bias': torch.empty(8),
            }
            for name, tensor in tensors.items():
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    module = Module()
    fill_random(module)
    values = dict(module.named_parameters())
    for weight in (values['weight'].float() * values['weight_scale_inv'], values['plain']):
        assert float(weight.std()) == pytest.approx(STD, rel=0.05)
    assert not values['e_score_correction_bias'].any()
