"""Ranks over Ray and gloo against one rank in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

from actors.ray_start import start_ray
from replayssm.config import CPU_RANK_RESOURCE
from replayssm.cpu import cluster as cluster_module
from tests.conftest import CheckpointFactory, TokenEngine
from tests.cpu.conftest import PROMPTS

Build = Callable[..., TokenEngine]
NUM_TOKENS = 16
LOGPROBS = 'raw_logprobs'


@pytest.fixture(scope='module')
def cluster() -> Iterator[None]:
    """A Ray cluster that belongs to this process, as to a Serve replica, with room for four ranks."""
    start_ray(num_cpus=4, resources={CPU_RANK_RESOURCE: 4})
    yield
    ray.shutdown()


def _answers(engine: TokenEngine) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens and their log probabilities."""
    responses = engine.responses(PROMPTS, NUM_TOKENS, logprobs=1)
    chosen = [position[token] for r in responses for token, position in zip(r.token_ids, r.logprobs, strict=True)]
    return [list(response.token_ids) for response in responses], torch.tensor(chosen)


def _assert_equal(engine: TokenEngine, expected: tuple[list[list[int]], torch.Tensor]) -> None:
    tokens, logprobs = _answers(engine)
    assert tokens == expected[0]
    torch.testing.assert_close(logprobs, expected[1], atol=1e-4, rtol=1e-4)


def test_two_ranks_in_a_cluster_of_their_own(build_engine: Build) -> None:
    expected = _answers(build_engine('tp4', logprobs_mode=LOGPROBS))
    engine = build_engine('tp4', tp=2, logprobs_mode=LOGPROBS)
    assert ray.cluster_resources()[CPU_RANK_RESOURCE] == 2
    _assert_equal(engine, expected)
    engine.close()
    assert not ray.is_initialized()


@pytest.mark.parametrize(('tp', 'num_drafts'), [pytest.param(2, 3, id='tp2-mtp3'), pytest.param(4, 1, id='tp4-mtp1')])
def test_ranks_in_a_given_cluster(build_engine: Build, cluster: None, tp: int, num_drafts: int) -> None:
    expected = _answers(build_engine('tp4', logprobs_mode=LOGPROBS))
    engine = build_engine('tp4', tp=tp, num_drafts=num_drafts, logprobs_mode=LOGPROBS)
    _assert_equal(engine, expected)
    engine.close()
    assert ray.is_initialized()


def test_bfloat16_ranks(
    cpu_device: None, cluster: None, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: ranks that do not stop in time are killed, and the engine closes all the same."""
    engine = TokenEngine(checkpoint('tp4', 'bfloat16'), tp=2, dtype='bfloat16', num_drafts=3)
    responses: list[Any] = engine.responses(PROMPTS, NUM_TOKENS)
    assert [len(response.token_ids) for response in responses] == [NUM_TOKENS] * len(PROMPTS)

    rank = engine.engine.executor.workers[0]
    monkeypatch.setattr(cluster_module, '_STOP_TIMEOUT_S', 0.0)
    engine.close()
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(rank.get_node_ip.remote())
