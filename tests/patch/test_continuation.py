"""What the scheduler does with a sequence that left the batch and comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lmdeploy.pytorch.engine.inputs_maker import LongContextChunker
from lmdeploy.pytorch.messages import MessageStatus
from lmdeploy.pytorch.model_inputs import ModelInputs
from lmdeploy.pytorch.paging.scheduler import Scheduler

from replayssm.patch import continuation, mrope
from replayssm.stats import counters_of
from tests.patch.scheduling import (
    BLOCK_SIZE,
    STOCK_AND_FIXED,
    add_sequence,
    admit,
    continue_sequence,
    decode_output,
    installed,
    make_scheduler,
    prefill_output,
)

PROMPT = 30
NEW_INPUT = (901, 902, 903)


def start(scheduler: Scheduler, num_tokens: int = PROMPT, session_id: int = 0, **sampling: Any) -> Any:
    """Return a sequence that has generated tokens 500 and 501."""
    seq = add_sequence(scheduler, num_tokens, session_id, **sampling)
    assert admit(scheduler) == [seq]
    prefill_output(seq, 500)
    decode_output(seq, [501])
    return seq


def preempt(scheduler: Scheduler, seq: Any) -> None:
    scheduler.preempt_seqs([seq])


def stop_by_itself(scheduler: Scheduler, seq: Any) -> None:
    decode_output(seq, [502], stop_pos=0)
    continue_sequence(seq, NEW_INPUT)


def abort(scheduler: Scheduler, seq: Any) -> None:
    scheduler.stop_session(seq.session_id)
    continue_sequence(seq, NEW_INPUT)


def abort_after_stop(scheduler: Scheduler, seq: Any) -> None:
    decode_output(seq, [502], stop_pos=0)
    abort(scheduler, seq)


def migrate(scheduler: Scheduler, seq: Any) -> None:
    seq.preserve_cache = True
    decode_output(seq, [502], stop_pos=0)
    assert seq.status is MessageStatus.TO_BE_MIGRATED and seq.num_blocks > 0
    seq.finish()
    continue_sequence(seq, NEW_INPUT)


DEPARTURES = pytest.mark.parametrize(
    ('depart', 'reason'),
    [
        (preempt, 'preemption'),
        (stop_by_itself, 'early_stop'),
        (abort, 'abort'),
        (abort_after_stop, 'early_stop'),
        (migrate, 'early_stop'),
    ],
    ids=['preemption', 'early-stop', 'abort', 'abort-after-stop', 'cache-kept-for-migration'],
)

SPEC = pytest.mark.parametrize('spec', [False, True], ids=['plain', 'mtp3'])


@STOCK_AND_FIXED
@SPEC
@DEPARTURES
def test_a_returning_sequence_is_computed_from_its_history(
    depart: Callable[[Scheduler, Any], None], reason: str, spec: bool, fixed: bool
) -> None:
    with installed(continuation, mrope, when=fixed):
        scheduler = make_scheduler(spec=spec)
        seq = start(scheduler)
        slot = seq.logical_state
        depart(scheduler, seq)
        expected = [*range(PROMPT), 500, 501]
        if reason != 'preemption':
            expected += ([502] if depart is not abort else []) + [*NEW_INPUT]
        covered = int(seq.num_history_ids)

        assert admit(scheduler) == [seq]

        if not fixed:
            assert seq.num_history_ids == covered > 0 and seq.logical_state == slot
            return
        assert seq.num_history_ids == 0
        assert seq.token_ids.tolist() == expected
        assert seq.num_blocks == -(-len(expected) // BLOCK_SIZE)
        assert seq.logical_state >= 0
        counters = counters_of(scheduler)
        assert dict(counters.invalidations) == {reason: 1}
        assert dict(counters.recomputed_tokens) == {reason: covered}


@STOCK_AND_FIXED
@SPEC
def test_generation_goes_on_where_it_was(spec: bool, fixed: bool) -> None:
    """The answer's length, its tokens and the budget for the rest survive the detour."""
    with installed(continuation, mrope, when=fixed):
        scheduler = make_scheduler(spec=spec)
        seq = start(scheduler, max_new_tokens=10)
        preempt(scheduler, seq)
        admit(scheduler)
        prefill_output(seq, 502)
        decode_output(seq, [503])
    assert seq.generated_ids.tolist() == [500, 501, 502, 503]
    assert seq.sampling_param.max_new_tokens - seq.num_new_tokens == 6
    assert seq.valid_ids.tolist() == [*range(PROMPT), 500, 501, 502, 503]


@STOCK_AND_FIXED
@SPEC
def test_resources_balance(spec: bool, fixed: bool) -> None:
    with installed(continuation, mrope, when=fixed):
        scheduler = make_scheduler(spec=spec)
        free_blocks = scheduler.block_manager.get_num_free_gpu_blocks()
        free_states = scheduler.state_manager.get_num_free()
        seqs = [start(scheduler, session_id=session_id) for session_id in range(3)]
        preempt(scheduler, seqs[0])
        stop_by_itself(scheduler, seqs[1])
        abort(scheduler, seqs[2])
        assert len(admit(scheduler)) == 3
        assert len({seq.logical_state for seq in seqs}) == 3
        for session_id in range(3):
            scheduler.end_session(session_id)
    assert scheduler.block_manager.get_num_free_gpu_blocks() == free_blocks
    assert scheduler.state_manager.get_num_free() == free_states


@SPEC
def test_a_long_prompt_between_two_chunks_is_left_alone(spec: bool) -> None:
    with installed(continuation, mrope):
        scheduler = make_scheduler(spec=spec, max_prefill_tokens=64)
        seq = add_sequence(scheduler, 150)
        chunker = LongContextChunker(64)
        assert admit(scheduler) == [seq]
        chunker.set_seq(seq)
        slot = seq.logical_state
        for done in (64, 128):
            chunk_size, _ = chunker.next_chunk_size()
            chunker.update_step(_chunk_of(chunk_size))
            add_sequence(scheduler, 4, session_id=done)
            assert seq not in admit(scheduler)
            assert (seq.num_history_ids, seq.logical_state) == (done, slot)
            is_last_chunk = chunker.is_last_chunk()
            assert scheduler.reserve_long_context_chunk(seq, chunk_size, is_last_chunk=is_last_chunk)
    assert is_last_chunk
    assert not counters_of(scheduler).invalidations


@STOCK_AND_FIXED
def test_a_long_history_comes_back_in_chunks(fixed: bool) -> None:
    with installed(continuation, mrope, when=fixed):
        scheduler = make_scheduler(max_prefill_tokens=64)
        seq = start(scheduler, num_tokens=60)
        for token in range(502, 520):
            decode_output(seq, [token])
        preempt(scheduler, seq)
        assert admit(scheduler) == [seq]
        assert LongContextChunker(64).is_long_context(seq) is fixed
        assert seq.kv_token_limit == (64 if fixed else None)


@STOCK_AND_FIXED
def test_a_prompt_aborted_between_chunks_starts_over(fixed: bool) -> None:
    """Logits and loss gathered so far go too, or the second pass would add them twice."""
    with installed(continuation, mrope, when=fixed):
        scheduler = make_scheduler(max_prefill_tokens=64)
        seq = add_sequence(scheduler, 150, out_logits=True, out_ce_loss=True)
        admit(scheduler)
        seq.append_logits(torch.zeros(64, 8, dtype=torch.bfloat16))
        seq.append_ce_loss(1.5)
        seq.set_step(64)
        abort(scheduler, seq)
        admit(scheduler)
    assert seq.num_history_ids == (0 if fixed else 64)
    assert len(seq.all_logits) == (0 if fixed else 64)
    assert seq.ce_loss == (0.0 if fixed else 1.5)


@STOCK_AND_FIXED
def test_a_checkpoint_inside_the_history_is_reused(fixed: bool) -> None:
    with installed(continuation, mrope, when=fixed):
        scheduler = make_scheduler(checkpoints=4)
        seq = add_sequence(scheduler, 2 * BLOCK_SIZE)
        admit(scheduler)
        assert scheduler.state_checkpoints.reserve_save(seq) >= 0
        scheduler.state_checkpoints.publish_save(seq)
        prefill_output(seq, 500)
        decode_output(seq, [501])
        preempt(scheduler, seq)
        assert admit(scheduler) == [seq]
        restore = seq.prefix_cache.restore
        if not fixed:
            assert not restore.is_selected and seq.num_history_ids == 2 * BLOCK_SIZE + 1
            return
        assert restore.is_selected and restore.node.state_checkpoint.step == 2 * BLOCK_SIZE
        assert seq.num_history_ids == 2 * BLOCK_SIZE
        assert seq.token_ids.tolist() == [500, 501]
        assert scheduler.block_trie.stats.num_hit_tokens == 0, 'a recomputation is no cache hit of a user'


def test_an_evicted_sequence_counts_as_recomputed() -> None:
    """The blocks of a preempted sequence may go to another one before it comes back."""
    with installed(continuation, mrope):
        scheduler = make_scheduler(num_blocks=4)
        seq = start(scheduler)
        preempt(scheduler, seq)
        assert scheduler.eviction_helper._reclaim_candidate(seq)
        assert admit(scheduler) == [seq]
        assert dict(counters_of(scheduler).invalidations) == {'preemption': 1}


@pytest.mark.parametrize('depart', [preempt, abort, stop_by_itself])
def test_models_without_state_keep_their_cache(depart: Callable[[Scheduler, Any], None]) -> None:
    outcomes = []
    for fixed in (False, True):
        with installed(continuation, when=fixed):
            scheduler = make_scheduler(ssm=False)
            seq = start(scheduler)
            depart(scheduler, seq)
            admit(scheduler)
            outcomes.append((seq.num_history_ids, seq.token_ids.tolist(), seq.num_blocks))
            assert not counters_of(scheduler).invalidations
    assert outcomes[0] == outcomes[1]


@STOCK_AND_FIXED
@pytest.mark.parametrize('depart', [preempt, abort])
def test_a_new_answer_gets_a_new_grammar_matcher(depart: Callable[[Scheduler, Any], None], fixed: bool) -> None:
    with installed(continuation, mrope, when=fixed):
        scheduler = make_scheduler()
        seq = start(scheduler, session_id=7)
        depart(scheduler, seq)
        admit(scheduler)
    expected = [7] if fixed and depart is abort else []
    assert scheduler.seq_meta.sampling_strategy.session_to_cleanup == expected


def test_routed_experts_are_collected_again() -> None:
    with installed(continuation, mrope):
        scheduler = make_scheduler()
        seq = start(scheduler, return_routed_experts=True)
        seq.append_routed_experts(np.zeros((31, 2, 2), dtype=np.uint16))
        preempt(scheduler, seq)
        admit(scheduler)
    assert len(seq.all_routed_experts) == 0


def test_undo_restores_every_method() -> None:
    before = Scheduler.schedule
    with installed(continuation):
        assert Scheduler.schedule is not before
    assert Scheduler.schedule is before


def _chunk_of(size: int) -> ModelInputs:
    lengths = torch.tensor([size])
    return ModelInputs(
        input_ids=torch.zeros(1, size, dtype=torch.long),
        seq_length=lengths,
        history_lengths=torch.tensor([0]),
        block_offsets=torch.zeros(1, 1, dtype=torch.long),
        is_decoding=False,
        num_ignored_history=torch.tensor([0]),
        max_q_seqlen=size,
        max_kv_seqlen=size,
        sum_kv_seqlen=size,
        is_chunk=True,
    )
