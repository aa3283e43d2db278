"""Recompute the retained history of a sequence whose private state may have run ahead of it.

LMDeploy sends forward N+1 before it reads the output of forward N. When a sequence is preempted, stopped or aborted,
an output is dropped that its recurrent state has already absorbed, while its history keeps only the tokens that were
read. Resuming on the same state slot applies the last token twice; under speculative decoding the snapshot that the
history needs is gone altogether. KV rows are addressed by position and written again before they are read, so only
models with recurrent state are touched here. (On the others an abort between two chunks of a long prompt can leave one
stale row in the draft model's cache: it costs acceptance and never changes a token.)

The rule: a WAITING sequence that still owns KV blocks or a state slot has run before, because admission makes a
sequence READY in the same breath as it allocates. Chunks of a long prompt stay RUNNING from the first to the last, so
they are never mistaken for it. Such a sequence gives everything back before the scheduler plans the next prefill:
chunking and token budgets then see the full length, and the prefix cache may serve any checkpoint inside the history.
New input must already be appended, so this cannot happen where the sequence leaves the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from lmdeploy.pytorch.messages import MessageStatus
from lmdeploy.pytorch.paging.scheduler import Scheduler
from lmdeploy.pytorch.paging.seq_states.states import ReadyState, RunningState, StateBase

from replayssm.patching import Patches
from replayssm.stats import InvalidationReason, counters_of

_DEPARTURE = '_replayssm_departure'

StateMethod = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Departure:
    """How a sequence left the batch, kept on the sequence until it is admitted again.

    Attributes:
        reason: what took it out.
        history_tokens: length of the history that its KV and state covered by the scheduler's account.
    """

    reason: InvalidationReason
    history_tokens: int


def install(patches: Patches) -> None:
    """Replace `Scheduler.schedule` and note every departure from the batch."""
    patches.set(Scheduler, 'schedule', _recompute_before(Scheduler.schedule))
    patches.set(ReadyState, 'evict', _note_departure(ReadyState.evict, 'preemption'))
    patches.set(RunningState, 'finish', _note_departure(RunningState.finish, 'early_stop'))
    patches.set(StateBase, 'stop', _note_departure(StateBase.stop, 'abort'))


def _recompute_before(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(schedule)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_ssm:
            for seq in self.waiting:
                _invalidate(self, seq)
        return schedule(self, *args, **kwargs)

    return wrapper


def _note_departure(method: StateMethod, reason: InvalidationReason) -> StateMethod:
    @wraps(method)
    def wrapper(self: Any) -> None:
        seq = self.seq
        # A second stop of a stopped sequence changes nothing about why it stopped.
        leaves = self.status is not MessageStatus.STOPPED and _owns_resources(seq)
        method(self)
        if leaves:
            setattr(seq, _DEPARTURE, Departure(reason, int(seq.num_history_ids)))

    return wrapper


def _owns_resources(seq: Any) -> bool:
    return bool(seq.num_blocks > 0 or seq.logical_state >= 0)


def _invalidate(scheduler: Any, seq: Any) -> None:
    """Drop what the WAITING `seq` computed earlier, if anything, and count it; its token history stays.

    A sequence whose resources were already evicted for another one is counted too: the recomputation is the same.
    """
    departure: Departure | None = vars(seq).pop(_DEPARTURE, None)
    owns_resources = _owns_resources(seq)
    if departure is None:
        if not owns_resources:
            return
        departure = Departure('continuation', int(seq.num_history_ids))
    preempted = departure.reason == 'preemption'
    if owns_resources:
        if scheduler.block_trie.enabled and preempted:
            seq.prefix_cache.suppress_match_stats = True
        scheduler.kv_load_coordinator.release_tracking(seq)
        seq.state.release_paging_resources()
    _forget_partial_scores(seq)
    sampling = scheduler.seq_meta.sampling_strategy
    if sampling is not None and not preempted:
        # The grammar matcher of a guided answer has run ahead as well; a new answer starts a new one.
        sampling.on_session_end(seq.session_id)
    counters_of(scheduler).invalidate(departure.reason, departure.history_tokens)


def _forget_partial_scores(seq: Any) -> None:
    """Drop logits and loss gathered from the chunks of an unfinished prompt: its prefill starts over."""
    seq.all_logits.resize(0)
    if not seq.ce_loss_finished:
        seq.ce_loss = 0.0
