"""The whole engine against transformers, token for token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.backends.default.rejection_sampling import DefaultRejectionSamplingImpl

from tests.conftest import TokenEngine
from tests.cpu.conftest import MAX_NEW_TOKENS, PROMPTS

Build = Callable[..., TokenEngine]
Greedy = Mapping[str, list[list[int]]]


@pytest.mark.parametrize('model', ['tiny', 'odd', 'moe'])
def test_one_prompt_at_a_time(build_engine: Build, greedy: Greedy, model: str) -> None:
    engine = build_engine(model)
    assert [engine.tokens([prompt], MAX_NEW_TOKENS)[0] for prompt in PROMPTS] == greedy[model]


@pytest.mark.parametrize(
    'options',
    [
        pytest.param({}, id='ragged-batch'),
        pytest.param({'max_batch_size': 2}, id='queue'),
        pytest.param({'max_prefill_token_num': 64}, id='chunked-prefill'),
        pytest.param({'num_drafts': 1}, id='mtp1'),
        pytest.param({'num_drafts': 3}, id='mtp3'),
        pytest.param({'num_drafts': 3, 'max_prefill_token_num': 64}, id='mtp3-chunked-prefill'),
        pytest.param({'num_drafts': 7}, id='mtp7'),
    ],
)
@pytest.mark.parametrize('model', ['tiny', 'odd'])
def test_batch(build_engine: Build, greedy: Greedy, model: str, options: dict[str, Any]) -> None:
    assert build_engine(model, **options).tokens(PROMPTS, MAX_NEW_TOKENS) == greedy[model]


@pytest.mark.parametrize('num_drafts', [0, 3], ids=['plain', 'mtp3'])
def test_prefix_caching(build_engine: Build, greedy: Greedy, num_drafts: int) -> None:
    # States are saved where chunks end: chunks of two blocks leave some that a second round can start from.
    engine = build_engine(
        'tiny',
        num_drafts=num_drafts,
        max_prefill_token_num=128,
        enable_prefix_caching=True,
        prefix_cache_state_budget=8,
    )
    for _ in range(2):
        assert engine.tokens(PROMPTS, MAX_NEW_TOKENS) == greedy['tiny']
    assert engine.engine.get_schedule_metrics().prefix_cache_hit_rate > 0


def test_drafts_are_partly_right(build_engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted: list[int] = []
    stock = DefaultRejectionSamplingImpl.forward_greedy

    def forward_greedy(self: Any, target: torch.Tensor, draft: torch.Tensor) -> Any:
        result = stock(self, target, draft)
        accepted.extend((draft.size(1) - result[1]).tolist())
        return result

    monkeypatch.setattr(DefaultRejectionSamplingImpl, 'forward_greedy', forward_greedy)
    build_engine('tiny', num_drafts=3).tokens(PROMPTS, MAX_NEW_TOKENS)
    assert 0.3 < sum(accepted) / len(accepted) < 2.5
    assert set(accepted) == {0, 1, 2, 3}


@torch.inference_mode()
@pytest.mark.parametrize('num_drafts', [0, 3], ids=['plain', 'mtp3'])
def test_poisoned_caches_are_harmless(build_engine: Build, greedy: Greedy, num_drafts: int) -> None:
    engine = build_engine('odd', num_drafts=num_drafts)
    agent = engine.engine.executor.model_agent
    for cache in agent.state_cache_engine.state_caches:
        cache.fill_(torch.nan)
    for layer in agent.cache_engine.gpu_cache:
        for cache in layer:
            cache.fill_(torch.nan)
    assert engine.tokens(PROMPTS, MAX_NEW_TOKENS) == greedy['odd']


@pytest.mark.parametrize('num_drafts', [0, 3], ids=['plain', 'mtp3'])
def test_bfloat16(build_engine: Build, num_drafts: int) -> None:
    engine = build_engine('tiny', dtype='bfloat16', num_drafts=num_drafts, logprobs_mode='raw_logprobs')
    assert engine.engine.model_config.dtype == torch.bfloat16
    responses = engine.responses(PROMPTS, 16, logprobs=1)
    assert [len(response.token_ids) for response in responses] == [16] * len(PROMPTS)
    chosen = torch.tensor([next(iter(position.values())) for response in responses for position in response.logprobs])
    assert chosen.isfinite().all()


def test_dtype_of_checkpoint_is_kept(build_engine: Build) -> None:
    assert build_engine('tiny', dtype='auto').engine.model_config.dtype == torch.float32
