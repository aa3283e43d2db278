from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replayssm import demo
from replayssm.config import ReplayConfig
from replayssm.plan import SHAPES, ModelShape, PlanOptions, load_shape, make_plan

MIB = 1 << 20
QWEN = SHAPES['qwen3.5-35b-a3b']


@pytest.mark.parametrize(
    ('num_drafts', 'stock_dtype', 'conv_mib', 'stock_mib'),
    [
        pytest.param(0, 'float32', 1.875, 60, id='float32'),
        pytest.param(0, 'bfloat16', 1.875, 30, id='bfloat16'),
        pytest.param(3, 'float32', 3.28125, 240, id='three drafts, float32'),
        pytest.param(3, 'bfloat16', 3.28125, 120, id='three drafts, bfloat16'),
    ],
)
def test_stock_slot(num_drafts: int, stock_dtype: str, conv_mib: float, stock_mib: float) -> None:
    plan = make_plan(QWEN, PlanOptions(num_drafts=num_drafts, stock_dtype=stock_dtype))  # type: ignore[arg-type]
    assert plan.stock_slot_bytes == {'conv': conv_mib * MIB, 'checkpoint': stock_mib * MIB}


def test_replay_keeps_one_state_whatever_the_drafts() -> None:
    plan = make_plan(QWEN, PlanOptions(num_drafts=3))
    assert plan.replay_slot_bytes['checkpoint'] == 60 * MIB
    keys = 30 * 16 * 20 * 128 * 2
    deltas = 30 * 32 * 20 * 128 * 4
    norms, gates = 30 * 16 * 20 * 4, 30 * 32 * 20 * 4
    assert plan.replay_slot_bytes['ring'] == keys + deltas + norms + gates


def test_slots_are_those_that_lmdeploy_allocates() -> None:
    plan = make_plan(QWEN, PlanOptions(max_batch_size=64, prefix_cache_state_budget=10))
    assert plan.slots == 76
    assert plan.stock_bytes == 76 * sum(plan.stock_slot_bytes.values())


def test_saved_bytes_become_kv_blocks() -> None:
    options = PlanOptions(num_drafts=3, cache_max_entry_count=0.5)
    plan = make_plan(QWEN, options)
    # Keys and values of ten layers and the draft layer, two heads of 256, 64 tokens, bfloat16.
    assert plan.kv_block_bytes == 2 * 11 * 2 * 256 * 64 * 2
    assert plan.kv_blocks_gained == (plan.stock_bytes - plan.replay_bytes) // 2 // plan.kv_block_bytes


def test_without_drafts_the_ring_costs_blocks() -> None:
    assert make_plan(QWEN, PlanOptions(num_drafts=0)).kv_blocks_gained < 0


def test_ranks_share_the_heads() -> None:
    whole, half = (make_plan(QWEN, PlanOptions(tp=tp, num_drafts=3)) for tp in (1, 2))
    for kind in ('conv', 'checkpoint', 'ring'):
        assert half.replay_slot_bytes[kind] * 2 == whole.replay_slot_bytes[kind]
    assert half.kv_block_bytes * 2 == whole.kv_block_bytes


def test_more_ranks_than_kv_heads_keep_a_copy_each() -> None:
    two, four = (make_plan(QWEN, PlanOptions(tp=tp)) for tp in (2, 4))
    assert two.kv_block_bytes == four.kv_block_bytes


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        pytest.param(PlanOptions(tp=3), r'tp: expected a divisor of 16 key heads, got 3', id='heads'),
        pytest.param(
            PlanOptions(num_drafts=3, replay=ReplayConfig(buffer_len=3)),
            r'buffer_len: expected at least 4',
            id='drafts',
        ),
    ],
)
def test_impossible_options_are_refused(options: PlanOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(QWEN, options)


@pytest.mark.parametrize('name', [name for name, spec in demo.SPECS.items() if isinstance(spec, demo.DemoSpec)])
def test_a_checkpoint_is_read_from_its_config(name: str, checkpoint: Callable[[str], Path]) -> None:
    spec = demo.SPECS[name]
    assert isinstance(spec, demo.DemoSpec)
    shape = load_shape(str(checkpoint(name)))
    assert shape == ModelShape(
        linear_layers=3 * spec.num_blocks,
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        key_dim=spec.key_head_dim,
        value_dim=spec.value_head_dim,
        conv_width=4,
        attention_layers=spec.num_blocks,
        kv_heads=spec.kv_heads,
        attention_dim=spec.attention_head_dim,
        draft_layers=1,
        dtype=torch.float32,
    )


def test_a_config_without_linear_layers_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / 'config.json').write_text(json.dumps({'layer_types': ['full_attention'] * 2}))
    with pytest.raises(ValueError, match="model with GDN or KDA layers, but 'linear_num_key_heads' is missing"):
        load_shape(str(tmp_path))


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expected qwen3\.5-35b-a3b, .* or a folder .*, got 'nonsense'"):
        load_shape('nonsense')


def test_shapes_differ_in_what_they_are_named_for() -> None:
    assert SHAPES['qwen3.5-9b'] == replace(QWEN, linear_layers=24, attention_layers=8, kv_heads=4)


def test_glm_on_four_gpus_saves_at_least_5_9_gib_each() -> None:
    """The figure of GLM-5.3-Flash at TP4 with three drafts and 64 sequences, float32 states against stock's four."""
    records = ReplayConfig(record_dtype='bfloat16')
    plan = make_plan(SHAPES['glm-5.3-flash'], PlanOptions(tp=4, num_drafts=3, replay=records))
    assert plan.stock_slot_bytes['checkpoint'] == 4 * plan.replay_slot_bytes['checkpoint'] == 136 * MIB
    assert plan.stock_slot_bytes['conv'] == plan.replay_slot_bytes['conv'] == pytest.approx(2.79 * MIB, rel=1e-3)
    assert plan.stock_slot_bytes['index'] == plan.replay_slot_bytes['index'] == 12 * 7 * 2 * 128 * 2
    # keys, gate logits and deltas are alike: one vector of 128 per record and head in bfloat16; and 1 / |k|
    assert plan.replay_slot_bytes['ring'] == 34 * 16 * 20 * (3 * 128 * 2 + 4)
    saved_gib = (plan.stock_bytes - plan.replay_bytes) / 2**30
    assert 6.0 < saved_gib < 6.1


def test_latent_attention_is_held_by_every_rank() -> None:
    one, four = (make_plan(SHAPES['glm-5.3-flash'], PlanOptions(tp=tp, num_drafts=0)) for tp in (1, 4))
    # the latent of every token, and a quarter of an index key, in eleven layers
    assert one.kv_block_bytes == four.kv_block_bytes == 11 * (512 + 128 // 4) * 64 * 2


def test_glm_is_read_from_a_config_that_leaves_layer_types_out(tmp_path: Path) -> None:
    text = {'model_type': 'glm5_next_text', 'index_kpool': 4, 'num_nextn_predict_layers': 1, 'dtype': 'bfloat16'}
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'glm5_next', 'text_config': text}))
    assert load_shape(str(tmp_path)) == SHAPES['glm-5.3-flash']
