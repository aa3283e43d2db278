"""LMDeploy's scheduler and sequences driven by hand: what the engine loop does, without a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
from lmdeploy.pytorch.messages import SamplingParam, SequenceMeta, UpdateTokenMode
from lmdeploy.pytorch.paging.scheduler import Scheduler
from lmdeploy.pytorch.strategies.ar.sampling import ARSamplingStrategy
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy
from lmdeploy.pytorch.strategies.ar_spec.sequence import ARSpecSequenceStrategy

from replayssm.patching import Patches

BLOCK_SIZE = 16
NUM_DRAFTS = 3

STOCK_AND_FIXED = pytest.mark.parametrize('fixed', [False, True], ids=['stock', 'fixed'])
"""Runs a test without the fix, where it asserts the fault, and with it: a release that mends the fault shows."""


@contextmanager
def installed(*fixes: ModuleType, when: bool = True) -> Iterator[None]:
    patches = Patches()
    try:
        if when:
            for fix in fixes:
                fix.install(patches)
        yield
    finally:
        patches.undo()


def make_scheduler(
    spec: bool = False,
    ssm: bool = True,
    use_mrope: bool = False,
    num_blocks: int = 64,
    max_batches: int = 4,
    max_prefill_tokens: int = 256,
    checkpoints: int = 0,
) -> Scheduler:
    strategy = ARSpecSequenceStrategy() if spec else ARSequenceStrategy()
    cache_config = CacheConfig(
        max_batches=max_batches,
        block_size=BLOCK_SIZE,
        num_cpu_blocks=0,
        num_gpu_blocks=num_blocks,
        max_prefill_token_num=max_prefill_tokens,
        enable_prefix_caching=checkpoints > 0,
        num_state_caches=max_batches + 2 + checkpoints,
        prefix_cache_state_budget=checkpoints,
        states_shapes=[((1, 4, 4), 'float32')] if ssm else [],
    )
    return Scheduler(
        SchedulerConfig(max_batches=max_batches, max_session_len=4096),
        cache_config,
        SequenceMeta(BLOCK_SIZE, strategy=strategy, sampling_strategy=ARSamplingStrategy(0), use_mrope=use_mrope),
    )


def add_sequence(scheduler: Scheduler, num_tokens: int, session_id: int = 0, **sampling: Any) -> Any:
    """Add a prompt of tokens 0, 1, 2 and so on in a session of its own."""
    session = scheduler.add_session(session_id)
    return session.add_sequence(np.arange(num_tokens), sampling_param=SamplingParam(**sampling))


def continue_sequence(seq: Any, token_ids: Sequence[int], **inputs: Any) -> None:
    """Append new input to a stopped sequence, as `Engine._add_message` does."""
    seq.update_token_ids(np.array(token_ids), mode=UpdateTokenMode.INPUTS, **inputs)
    seq.activate()


def admit(scheduler: Scheduler) -> list[Any]:
    """Run one prefill turn and dispatch it."""
    running: list[Any] = scheduler.schedule(is_prefill=True).running
    scheduler.activate_seqs(running)
    return running


def prefill_output(seq: Any, token: int, stopped: bool = False) -> None:
    """Apply the output of a prefill; drafts are negative so that they are recognised in a history."""
    drafts = -np.ones(NUM_DRAFTS, dtype=np.int64)
    stop_pos = 0 if stopped else -1
    seq.update_token_ids(np.array([token]), draft_token_ids=drafts, mode=UpdateTokenMode.PREFILL, stop_pos=stop_pos)
    if stopped:
        seq.finish()


def decode_output(seq: Any, accepted: Sequence[int], stop_pos: int = -1) -> None:
    """Apply the output of a decode step; without drafts `accepted` is one token and any `stop_pos` >= 0 stops."""
    tokens = np.array([*accepted] + [-1] * (NUM_DRAFTS + 1 - len(accepted)))
    if not hasattr(seq, '_num_valid_ids'):
        tokens = tokens[:1]
    drafts = -np.ones(NUM_DRAFTS, dtype=np.int64)
    seq.update_token_ids(tokens, draft_token_ids=drafts, mode=UpdateTokenMode.DECODE, stop_pos=stop_pos)
    if stop_pos >= 0:
        seq.finish()
