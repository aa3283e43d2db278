"""LMDeploy's engine on a GPU with random weights, led through tokens that are given.

Engines are led through the same tokens, so that every step's logits can be compared: sampled tokens would part ways at
the first near tie.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm import patch
from replayssm.patching import Patches

TARGET_TOKEN, DRAFT_TOKEN = 1117, 2229
PROMPTS = (130, 7, 65)


class _Calls:
    """Counts calls since an engine began to generate, its warm-up left out."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def next(self) -> int:
        return next(self._numbers)

    restart = __init__


_VERIFICATIONS, _DRAFTS = _Calls(), _Calls()


@contextmanager
def forced_tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    """Random weights, and every sampled and drafted token forced; verify steps accept 0..3 drafts in turn."""
    monkeypatch.setenv('LMDEPLOY_FP32_MAMBA_SSM_DTYPE', '1')
    from lmdeploy.pytorch import envs
    from lmdeploy.pytorch.backends.cuda.rejection_sampling import CudaRejectionSamplingImpl
    from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor
    from lmdeploy.pytorch.spec_decode.proposers.deepseek_mtp import DeepseekMTP

    from replayssm.patch import random_weights
    from replayssm.patch.forced_acceptance import accept

    monkeypatch.setattr(envs, 'fp32_mamba_ssm_dtype', True)
    patches = Patches()
    random_weights.install(patches)

    @patches.wrap(FusedLogitsProcessor, 'sampling')
    def sampling(sample: Any, self: Any, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(sample(self, logits), TARGET_TOKEN)

    @patches.wrap(DeepseekMTP, 'get_outputs')
    async def get_outputs(get: Any, self: Any, *args: Any, **options: Any) -> Any:
        drafts, *rest = await get(self, *args, **options)
        return torch.full_like(drafts, DRAFT_TOKEN), *rest

    @patches.wrap(CudaRejectionSamplingImpl, 'forward_greedy')
    def forward_greedy(verify: Any, self: Any, target: torch.Tensor, draft: torch.Tensor) -> Any:
        accepted = (torch.arange(draft.size(0), device=draft.device) + _VERIFICATIONS.next()) % (draft.size(1) + 1)
        return accept(torch.full_like(target, TARGET_TOKEN), draft, accepted)

    try:
        yield patches
    finally:
        patch.disable()
        patches.undo()


def draft_right_tokens(patches: Patches, drafts: int) -> None:
    """Have the s-th round of drafts begin with s mod (1 + drafts) right tokens, and verification accept those.

    What an engine says is then what it says without drafts.
    """
    from lmdeploy.pytorch.backends.cuda.rejection_sampling import CudaRejectionSamplingImpl
    from lmdeploy.pytorch.spec_decode.proposers.deepseek_mtp import DeepseekMTP

    from replayssm.patch.forced_acceptance import accept

    @patches.wrap(DeepseekMTP, 'get_outputs')
    async def get_outputs(get: Any, self: Any, *args: Any, **options: Any) -> Any:
        tokens, *rest = await get(self, *args, **options)
        count, index = divmod(_DRAFTS.next(), drafts)
        is_right = index < count % (1 + drafts)
        return torch.full_like(tokens, TARGET_TOKEN if is_right else DRAFT_TOKEN), *rest

    @patches.wrap(CudaRejectionSamplingImpl, 'forward_greedy')
    def forward_greedy(verify: Any, self: Any, target: torch.Tensor, draft: torch.Tensor) -> Any:
        accepted = (draft == TARGET_TOKEN).long().cumprod(1).sum(1)
        return accept(torch.full_like(target, TARGET_TOKEN), draft, accepted)


async def run(
    path: Path, drafts: int, method: str, eager: bool = False, prompts: Sequence[int] = PROMPTS
) -> tuple[list[torch.Tensor], Any]:
    """Logits of every step of prompts of these lengths, and the engine's statistics if replay is on.

    Args:
        path: holds a config.json.
    """
    from lmdeploy.messages import GenerationConfig, PytorchEngineConfig, SpeculativeConfig
    from lmdeploy.pytorch.engine.engine import Engine

    from replayssm.demo.tokenizer import build_tokenizer

    from .logits import recorded_logits

    build_tokenizer().save_pretrained(path)

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
        speculative_config=SpeculativeConfig(method, num_speculative_tokens=drafts) if drafts else None,
    )
    engine.start_loop()
    config = GenerationConfig(max_new_tokens=96, ignore_eos=True, top_k=1)

    async def one(session_id: int, length: int) -> None:
        prompt = torch.randint(100, 4000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        async for _ in engine.create_instance().async_stream_infer(session_id, prompt, config):
            pass

    with recorded_logits() as records:
        _VERIFICATIONS.restart()
        _DRAFTS.restart()
        # One after the other: the engines must see the same batches.
        for session_id, length in enumerate(prompts, 1):
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
