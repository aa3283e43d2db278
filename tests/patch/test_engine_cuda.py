"""ReplaySSM in LMDeploy's engine on a GPU, under CUDA graphs, on a dense Qwen3.5 of four layers with random weights.

Both engines are led through the same tokens, so that every step's logits can be compared: sampled tokens would part
ways at the first near tie. The model is dense because a router's near ties are no better.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm import patch
from replayssm.config import ReplayConfig
from replayssm.patch import Settings
from replayssm.patching import Patches

pytestmark = pytest.mark.cuda

TARGET_TOKEN, DRAFT_TOKEN = 1117, 2229


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    """Random weights, and every sampled and drafted token forced; verify steps accept 0..3 drafts in turn."""
    monkeypatch.setenv('LMDEPLOY_FP32_MAMBA_SSM_DTYPE', '1')
    from lmdeploy.pytorch import envs
    from lmdeploy.pytorch.backends.cuda.rejection_sampling import CudaRejectionSamplingImpl
    from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor
    from lmdeploy.pytorch.engine.model_agent import agent
    from lmdeploy.pytorch.spec_decode.proposers import base as proposers
    from lmdeploy.pytorch.spec_decode.proposers.deepseek_mtp import DeepseekMTP

    from tests.bench.forced_acceptance import accept
    from tests.bench.random_weights import fill_random

    monkeypatch.setattr(envs, 'fp32_mamba_ssm_dtype', True)
    patches, steps = Patches(), iter(range(10**6))
    for module in (agent, proposers):
        patches.set(module, 'load_model_weights', fill_random)

    @patches.wrap(FusedLogitsProcessor, 'sampling')
    def sampling(sample: Any, self: Any, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(sample(self, logits), TARGET_TOKEN)

    @patches.wrap(DeepseekMTP, 'get_outputs')
    async def get_outputs(get: Any, self: Any, *args: Any, **options: Any) -> Any:
        drafts, *rest = await get(self, *args, **options)
        return torch.full_like(drafts, DRAFT_TOKEN), *rest

    @patches.wrap(CudaRejectionSamplingImpl, 'forward_greedy')
    def forward_greedy(verify: Any, self: Any, target: torch.Tensor, draft: torch.Tensor) -> Any:
        accepted = (torch.arange(draft.size(0), device=draft.device) + next(steps)) % (draft.size(1) + 1)
        return accept(torch.full_like(target, TARGET_TOKEN), draft, accepted)

    yield patches
    patch.disable()
    patches.undo()


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
    """Logits of every step of a batch of three, and the engine's statistics if replay is on."""
    from lmdeploy.messages import GenerationConfig, PytorchEngineConfig, SpeculativeConfig
    from lmdeploy.pytorch.engine.engine import Engine

    from .logits import recorded_logits

    write_config(path)
    engine = Engine.from_pretrained(
        str(path),
        engine_config=PytorchEngineConfig(
            dtype='bfloat16',
            max_batch_size=4,
            session_len=1024,
            num_gpu_blocks=128,
            language_model_only=True,
            eager_mode=eager,
            cudagraph_capture_batch_sizes=[4],
        ),
        speculative_config=SpeculativeConfig('qwen3_5_mtp', num_speculative_tokens=drafts) if drafts else None,
    )
    engine.start_loop()
    config = GenerationConfig(max_new_tokens=96, ignore_eos=True, do_sample=False)

    async def one(session_id: int, length: int) -> None:
        prompt = torch.randint(100, 4000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        async for _ in engine.create_instance().async_stream_infer(session_id, prompt, config):
            pass

    with recorded_logits() as records:
        # One after the other: the engines must see the same batches.
        for session_id, length in enumerate((130, 7, 65), 1):
            await one(session_id, length)
    stats = await patch.collect(engine) if patch.current() else None
    engine.close()
    await asyncio.gather(engine.wait_tasks(), return_exceptions=True)
    return [record.cpu() for record in records], stats


def worst_relative_error(on: list[torch.Tensor], off: list[torch.Tensor]) -> float:
    assert [r.shape for r in on] == [r.shape for r in off]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(on, off, strict=True)]
    print('relative errors', [f'{error:.1e}' for error in errors])
    return max(errors)


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
