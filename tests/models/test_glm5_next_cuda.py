"""GLM-5.3-Flash on a GPU, under CUDA graphs: four layers with random weights, all experts and all tokens chosen.

Its routers and indexers have nothing to choose, since near ties would part the engines that are compared; the choice
of tokens is tested by itself, against the CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from replayssm import patch
from replayssm.config import ReplayConfig
from replayssm.demo.glm5_next import build_config
from replayssm.demo.specs import Glm5NextSpec
from replayssm.demo.tokenizer import END_OF_TEXT, END_OF_TURN
from replayssm.models.glm5_next import graphs
from replayssm.models.glm5_next.paging import build_paging
from replayssm.patch import Settings
from replayssm.patching import Patches
from tests.patch import cuda_engine
from tests.patch.cuda_engine import PROMPTS, draft_right_tokens, worst_relative_error

from .small_indexer import BLOCK, HIDDEN, RANK, Caches, decode, local_indexer, step

pytestmark = pytest.mark.cuda

OFF, ON = Settings(replay=None), Settings(replay=ReplayConfig(16))
TOLERANCE = 3e-2
SPEC = Glm5NextSpec(
    'the head dimensions of the real model',
    hidden_size=1024,
    num_layers=4,
    intermediate_size=2048,
    linear_heads=8,
    linear_head_dim=128,
    attention_heads=8,
    q_rank=256,
    kv_rank=512,
    key_dim=256,
    value_dim=256,
    index_heads=32,
    index_dim=128,
    index_top_tokens=2048,
    expert_size=256,
    num_experts=4,
    swiglu_limit=10.0,
)


async def run(
    path: Path, drafts: int, eager: bool = False, prompts: tuple[int, ...] = PROMPTS
) -> tuple[list[torch.Tensor], Any]:
    special = (END_OF_TEXT, END_OF_TURN, '<|image_pad|>', '<|video_pad|>', '<|vision_start|>', '<|vision_end|>')
    config = build_config(SPEC, 'bfloat16', {name: i for i, name in enumerate(special, 1)})
    config['text_config'] |= {'vocab_size': 4096, 'num_experts_per_tok': SPEC.num_experts}
    (path / 'config.json').write_text(json.dumps(config))
    return await cuda_engine.run(path, drafts, 'deepseek_mtp', eager, prompts)


@pytest.mark.parametrize('drafts', [0, 3], ids=['plain', 'mtp3'])
async def test_logits_equal_those_of_stock_states(forced: Patches, tmp_path: Path, drafts: int) -> None:
    patch.enable(OFF)
    off, _ = await run(tmp_path, drafts)
    patch.enable(ON)
    on, stats = await run(tmp_path, drafts)
    assert len(on) > 60
    assert stats.ranks[0].flushes > 8
    assert worst_relative_error(on, off) < TOLERANCE


@pytest.mark.parametrize('settings', [OFF, ON], ids=['stock', 'replay'])
async def test_graphs_and_eager_steps_agree(
    forced: Patches, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long prompt outgrows the page table of the first graphs."""
    monkeypatch.setattr(graphs, '_NARROWEST_TOKENS', 128)
    patch.enable(settings)
    captured, _ = await run(tmp_path, 3)
    eager, _ = await run(tmp_path, 3, eager=True)
    assert worst_relative_error(captured, eager) < TOLERANCE


async def test_drafts_change_no_logits(forced: Patches, tmp_path: Path) -> None:
    """Every count of accepted drafts in turn; rejected ones are wrong."""
    patch.enable(ON)
    plain, _ = await run(tmp_path, 0, prompts=(130,))
    draft_right_tokens(forced, 3)
    prompt, *verified = (await run(tmp_path, 3, prompts=(130,)))[0]
    rows = [prompt[:, -1]] + [r[:, i] for n, r in enumerate(verified) for i in range(1 + n % 4)]
    count = min(90, len(plain), len(rows))
    assert count > 80
    assert worst_relative_error(rows[:count], [r[:, -1] for r in plain[:count]]) < TOLERANCE


@pytest.mark.parametrize('window', [1, 4])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=['float32', 'bfloat16'])
@torch.no_grad()
def test_choice_and_attention_in_a_padded_graph_equal_the_cpu(window: int, dtype: torch.dtype) -> None:
    """Captured at one place of two sequences, replayed at others; in bfloat16 against its values in float32."""
    indexer, caches = local_indexer()[0].to(dtype), Caches()
    ours, theirs = local_indexer()[0].to('cuda', dtype), Caches()
    for name in ('latents', 'pools', 'tail'):
        cache = getattr(caches, name).to(dtype)
        setattr(caches, name, cache.float())
        setattr(theirs, name, cache.cuda())
    indexer = indexer.float()
    blocks = torch.tensor([[0, 2, 7, 1, 3], [6, 4, 8, 5, 3]])
    padded = step([5, 14, 0], window, True, F.pad(blocks, (0, 3, 0, 1)))
    metadata = SimpleNamespace(**{k: v if isinstance(v, bool) else v.cuda() for k, v in vars(padded).items()})
    slots = torch.tensor([1, 2, -1], device='cuda')
    x = torch.zeros(3 * window, HIDDEN, device='cuda', dtype=dtype)
    q_latent = torch.zeros(3 * window, RANK, device='cuda', dtype=dtype)

    def forward() -> torch.Tensor:
        return decode(ours, theirs, build_paging(metadata, slots, 3 * window, BLOCK), x, q_latent)

    saved = [cache.clone() for cache in theirs.tensors()]
    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for cache, values in zip(theirs.tensors(), saved, strict=True):
        cache.copy_(values)
    for history in ([2, 29], [3, 30], [31, 6]):
        values, queries = torch.randn(2 * window, HIDDEN).to(dtype), torch.randn(2 * window, RANK).to(dtype)
        x[: 2 * window], q_latent[: 2 * window] = values.cuda(), queries.cuda()
        metadata.kv_seqlens[:2] = torch.tensor(history, device='cuda') + window
        graph.replay()
        paging = build_paging(step(history, window, True, blocks), torch.tensor([1, 2]), 2 * window, BLOCK)
        expected = decode(indexer, caches, paging, values.float(), queries.float())
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        if dtype == torch.float32:
            torch.testing.assert_close(out[: 2 * window].cpu(), expected, rtol=tolerance, atol=tolerance)
        for found, wanted in zip(theirs.tensors(), caches.tensors(), strict=True):
            torch.testing.assert_close(found.float().cpu(), wanted, rtol=tolerance, atol=tolerance)
