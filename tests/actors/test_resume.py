"""A real engine goes on with an answer as the engine would have that began it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from lmdeploy.messages import GenerationConfig

import replayssm.cpu
from actors.config import EngineConfig, ModelConfig
from actors.engine import TokenEngine
from actors.generation import Generation
from actors.messages import GenerateRequest, Lease, TokenEvent
from replayssm import patch
from tests.patience import LIVENESS_S

PROMPT = list(range(60, 100))
LENGTH, CUT = 60, 23


@pytest.fixture
async def engine() -> AsyncIterator[TokenEngine]:
    """The demo model without drafts: with them a sample depends on how the windows fall."""
    shape = {'session_len': 512, 'max_batch_size': 2, 'num_gpu_blocks': 32, 'block_size': 16}
    config = EngineConfig.model_validate({'device': 'cpu', 'dtype': 'float32'} | shape)
    made = TokenEngine(ModelConfig(name='m', demo='tiny'), config, stall_timeout_s=60.0)
    made.start()
    async with asyncio.timeout(LIVENESS_S):
        while made.state == 'loading':
            await asyncio.sleep(0.05)
    assert made.state == 'ready', made.error
    yield made
    await asyncio.to_thread(made.close, LIVENESS_S)
    patch.disable()
    replayssm.cpu.disable()


async def generate(engine: TokenEngine, number: int, generation: Generation) -> list[int]:
    lease = Lease(f'r{number}', 'w', 'api', 's')
    request = GenerateRequest(lease, generation.input_ids, generation.gen_config)
    return [token async for event in engine.generate(request) for token in event.token_ids]


@pytest.mark.parametrize(
    'options',
    [
        pytest.param({'top_k': 1}, id='greedy'),
        pytest.param({'temperature': 0.9, 'top_k': 40, 'random_seed': 7}, id='seeded'),
        pytest.param({'top_k': 1, 'min_new_tokens': LENGTH, 'bad_token_ids': [101]}, id='at-least'),
    ],
)
async def test_it_goes_on_as_if_nothing_had_happened(engine: TokenEngine, options: dict[str, Any]) -> None:
    config = GenerationConfig(**({'max_new_tokens': LENGTH, 'ignore_eos': True} | options))
    whole = await generate(engine, 0, Generation(PROMPT, config))
    assert len(whole) == LENGTH
    resumed = Generation(PROMPT, config)
    resumed.take(TokenEvent(whole[:CUT]))
    assert await generate(engine, 1, resumed) == whole[CUT:]
