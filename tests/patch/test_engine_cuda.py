"""ReplaySSM in LMDeploy's engine on a GPU, under CUDA graphs, on a dense Qwen3.5 of four layers with random weights.

The model is dense because a router's near ties are no better than those of sampled tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm import patch
from replayssm.config import ReplayConfig
from replayssm.patch import Settings
from replayssm.patching import Patches

from . import cuda_engine
from .cuda_engine import worst_relative_error

pytestmark = pytest.mark.cuda


def write_config(path: Path) -> None:
    """Write the config.json of a Qwen3.5 with the head dimensions of the real models and little else of them."""
    from transformers import Qwen3_5Config

    config = Qwen3_5Config().to_dict()
    rope = {'rope_type': 'default', 'rope_theta': 10_000_000, 'partial_rotary_factor': 0.25}
    config['text_config'] |= {
        'num_hidden_layers': 4,
        'layer_types': ['linear_attention'] * 3 + ['full_attention'],
        'full_attention_interval': 4,
        'hidden_size': 1024,
        'intermediate_size': 2048,
        'num_attention_heads': 8,
        'num_key_value_heads': 2,
        'head_dim': 128,
        'linear_num_key_heads': 4,
        'linear_num_value_heads': 8,
        'linear_key_head_dim': 128,
        'linear_value_head_dim': 128,
        'vocab_size': 4096,
        'mtp_num_hidden_layers': 1,
        'mtp_use_dedicated_embeddings': False,
        'attn_output_gate': True,
        'dtype': 'bfloat16',
        'rope_parameters': rope | {'mrope_section': [6, 5, 5], 'mrope_interleaved': True},
    }
    config |= {'architectures': ['Qwen3_5ForConditionalGeneration'], 'dtype': 'bfloat16'}
    (path / 'config.json').write_text(json.dumps(config))


async def run(path: Path, drafts: int, eager: bool = False) -> tuple[list[torch.Tensor], Any]:
    write_config(path)
    return await cuda_engine.run(path, drafts, 'qwen3_5_mtp', eager)


@pytest.mark.parametrize('drafts', [0, 3], ids=['plain', 'mtp3'])
async def test_logits_equal_stock_under_cuda_graphs(forced: Patches, tmp_path: Path, drafts: int) -> None:
    patch.enable(Settings(replay=None))
    off, _ = await run(tmp_path, drafts)
    patch.enable(ReplayConfig(16))
    on, stats = await run(tmp_path, drafts)
    assert len(on) > 60
    assert stats.ranks[0].flushes > 8
    assert worst_relative_error(on, off) < 2e-2


async def test_graphs_and_eager_steps_agree(forced: Patches, tmp_path: Path) -> None:
    patch.enable(ReplayConfig(16))
    graphs, _ = await run(tmp_path, 3)
    eager, _ = await run(tmp_path, 3, eager=True)
    assert worst_relative_error(graphs, eager) < 2e-2


async def test_drafts_are_verified_without_fa3(
    forced: Patches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmdeploy.pytorch.backends.cuda import attention

    patch.enable(ReplayConfig(16))
    with_fa3, _ = await run(tmp_path, 3)
    monkeypatch.setattr(attention, 'use_fa3', False)
    for cached in (attention._enable_fa3, attention.use_fa3_warning):
        cached.cache_clear()
    try:
        without, _ = await run(tmp_path, 3)
    finally:
        for cached in (attention._enable_fa3, attention.use_fa3_warning):
            cached.cache_clear()
    assert worst_relative_error(without, with_fa3) < 2e-2
