"""Parts of GLM-5.3-Flash against transformers' modules, and what its loader and config refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection

from replayssm.models.glm5_next import weights
from replayssm.models.glm5_next.config import Glm5NextConfigBuilder
from replayssm.models.glm5_next.hyper import HyperConnection
from replayssm.models.glm5_next.mlp import clamped_swiglu
from replayssm.models.glm5_next.paging import Group, build_paging

from .small_indexer import BLOCK, DIM, HIDDEN, POOL, RANK, config, local_indexer, randomised, step


def test_hyper_connections_equal_transformers() -> None:
    text = config().text_config
    theirs = randomised(Glm5NextTextHyperConnection(text))
    ours = HyperConnection(text, torch.device('cpu'))
    ours.load_state_dict(theirs.state_dict())
    streams, output = torch.randn(1, 5, 4, HIDDEN), torch.randn(1, 5, HIDDEN)
    post, comb, collapsed = theirs(streams)
    read, *factors = ours.read(streams)
    torch.testing.assert_close(read, collapsed, rtol=1e-5, atol=1e-5)
    expected = post[..., None] * output[..., None, :] + comb.mT @ streams
    torch.testing.assert_close(ours.write(output, streams, *factors), expected, rtol=1e-5, atol=1e-5)
    # the matrix that mixes the streams is doubly stochastic, and its transpose is another one
    torch.testing.assert_close(factors[1].sum(-2), torch.ones(1, 5, 4), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(factors[1], factors[1].mT, atol=1e-3)


def test_swiglu_is_clamped_on_one_side_of_the_gate_and_both_of_the_other() -> None:
    gate, up = torch.tensor([-30.0, 0.5, 30.0]), torch.tensor([-30.0, 0.5, 30.0])
    out = clamped_swiglu(torch.cat([gate, up]), 1.0)
    silu = torch.nn.functional.silu
    torch.testing.assert_close(out, silu(torch.tensor([-30.0, 0.5, 1.0])) * torch.tensor([-1.0, 0.5, 1.0]))


@pytest.mark.parametrize('lengths', [(41,), (3, 1, 6, 9, 22), (1,) * 20, (30, 2, 2, 7)], ids=str)
def test_pools_and_selection_equal_transformers(lengths: tuple[int, ...]) -> None:
    """Prompts in chunks off multiples of the pool, with rejected drafts behind every chunk."""
    ours, theirs = local_indexer()
    total, drafts = sum(lengths), 3
    x, q_latent = torch.randn(1, total, HIDDEN), torch.randn(1, total, RANK)
    indices = theirs(x, q_latent, torch.ones(1, total, dtype=torch.bool), None)
    pools = torch.full((8, BLOCK // POOL, DIM), float('nan'))
    tail = torch.full((2, POOL + drafts, 2, DIM), float('nan'))
    slots, history = torch.tensor([1]), 0
    with torch.no_grad():
        for length in lengths:
            chunk = slice(history, history + length)
            paging = build_paging(step([history], length, False), slots, length, BLOCK)
            ours.write(x[0, chunk], pools, tail, paging)
            group: Group
            (group,) = paging.groups
            selected = ours.select(q_latent[:, chunk], x[:, chunk], pools, group)[0]
            for row, expected in zip(selected, indices[0, chunk], strict=True):
                assert sorted(row[row >= 0].tolist()) == sorted(expected[expected >= 0].tolist())
            history += length
            wrong = build_paging(step([history], drafts, True), slots, drafts, BLOCK)
            ours.write(torch.randn(drafts, HIDDEN), pools, tail, wrong)
    assert pools[0].isnan().all(), 'a page of nobody was written'


def test_fp8_blocks_of_the_latent_projection_are_dequantised() -> None:
    module = nn.Module()
    module.kv_b_proj = nn.Linear(200, 130, bias=False)
    weight, scale = torch.randn(130, 200).to(torch.float8_e4m3fn), torch.rand(2, 2)
    checkpoint = [('kv_b_proj.weight_scale_inv', scale), ('kv_b_proj.weight', weight)]
    weights.load(module, checkpoint, lambda name: name)
    expected = weight.float()
    for i, rows in enumerate((slice(0, 128), slice(128, 130))):
        for j, columns in enumerate((slice(0, 128), slice(128, 200))):
            expected[rows, columns] *= scale[i, j]
    torch.testing.assert_close(module.kv_b_proj.weight.data, expected)


def test_missing_and_unexpected_weights_are_named() -> None:
    module = nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r'checkpoint: 1 weights are missing, the first is bias'):
        weights.load(module, [('weight', torch.ones(3, 2))], lambda name: name)
    with pytest.raises(ValueError, match=r'checkpoint: unexpected weight other'):
        weights.load(module, [('other', torch.ones(1))], lambda name: name)


@pytest.mark.parametrize(
    ('changes', 'options', 'message'),
    [
        ({'linear_num_heads': 6}, {'tp': 4}, 'tp: expected a divisor of linear_num_heads=6, got 4'),
        ({}, {'spec_method': 'eagle3'}, "speculative method: expected 'deepseek_mtp' for glm5_next, got 'eagle3'"),
        ({'num_nextn_predict_layers': 0}, {'spec_method': 'deepseek_mtp'}, 'num_nextn_predict_layers: expected 1'),
        ({'indexer_types': ['full'] * 3 + ['shared']}, {}, "indexer_types: expected 'full' in every layer"),
        ({'index_kpool_always_select_tail': False}, {}, 'index_kpool_always_select_tail: expected true'),
        ({'index_head_dim': 18}, {}, 'index_head_dim: expected a multiple of index_kpool=4'),
    ],
)
def test_configs_that_are_not_covered_are_refused(changes: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Glm5NextConfigBuilder.build(config(**changes), **options)


def test_layers_see_the_format_of_an_fp8_checkpoint() -> None:
    """Checkpoints describe it for all of the model, beside the text config; layers are built from the text config."""
    fp8 = {'quant_method': 'fp8', 'weight_block_size': [128, 128]}
    whole = config()
    whole.quantization_config = fp8
    Glm5NextConfigBuilder.build(whole)
    assert whole.text_config.quantization_config == fp8
    plain = config()
    Glm5NextConfigBuilder.build(plain)
    assert getattr(plain.text_config, 'quantization_config', None) is None


@pytest.mark.parametrize('attention', ['full_attention', 'deepseek_sparse_attention', 'indexed_attention'])
def test_other_names_of_the_layer_types_are_understood(attention: str) -> None:
    types = ['linear_attention'] * 3 + [attention]
    assert Glm5NextConfigBuilder.build(config(layer_types=types)).num_layers == 1
