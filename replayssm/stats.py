"""Counters and byte counts as values; whoever exports them turns them into metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from replayssm.layout import Kind

InvalidationReason = Literal['preemption', 'early_stop', 'abort', 'continuation']
"""Why a sequence's private KV and state were dropped although its token history was kept."""

_ATTRIBUTE = '_replayssm_counters'


@dataclass(slots=True)
class SchedulerCounters:
    """What the scheduler's side of one engine has counted since its start; values only grow."""

    invalidations: Counter[str] = field(default_factory=Counter)
    recomputed_tokens: Counter[str] = field(default_factory=Counter)
    accepted_drafts: Counter[int] = field(default_factory=Counter)

    def invalidate(self, reason: InvalidationReason, tokens: int) -> None:
        """Count one dropped state and the `tokens` of history that a prefill computes again because of it."""
        self.invalidations[reason] += 1
        self.recomputed_tokens[reason] += tokens


def counters_of(scheduler: Any) -> SchedulerCounters:
    """Return the counters that belong to LMDeploy's `Scheduler` object, made on first use."""
    counters = getattr(scheduler, _ATTRIBUTE, None)
    if counters is None:
        counters = SchedulerCounters()
        setattr(scheduler, _ATTRIBUTE, counters)
    return counters


@dataclass(frozen=True, slots=True)
class GpuStats:
    """One GPU as NVML sees it. A value that the card does not report is None.

    Attributes:
        node: name of the host.
        index: NVML's index there.
        memory_used_bytes: used by all processes.
        memory_peak_bytes: the most that was used whenever these statistics were read since the start of the process.
        utilization_ratio: share of the last sample period in which a kernel ran, 0 to 1.
    """

    node: str
    index: int
    memory_used_bytes: int | None
    memory_peak_bytes: int | None
    memory_total_bytes: int | None
    utilization_ratio: float | None


@dataclass(frozen=True, slots=True)
class RankStats:
    """State memory and replay counters of one tensor-parallel rank.

    Attributes:
        rank: tensor-parallel rank.
        state_bytes: bytes allocated for state slots, by kind.
        stock_bytes: bytes that stock LMDeploy would hold for the same slots, drafts and checkpoint dtype.
        kv_block_bytes: bytes of one block of the paged KV cache, draft layers included; 0 in a sleeping engine.
        decode_steps: decode and verify forwards.
        windows: windows decoded or verified, one per sequence and forward.
        flushes: checkpoints rewritten, summed over sequences; a layer's traffic counts once.
        records: records appended.
        replayed_records: committed records read back, by every window those behind its checkpoint.
        rejected_records: records rolled back because their drafts were rejected.
        traffic_bytes, stock_traffic_bytes: bytes of recurrent state and records that these forwards read and wrote,
            and what stock LMDeploy would have for the same windows; see `with_traffic`.
        gpu: the GPU of this rank, None without one.
    """

    rank: int
    state_bytes: Mapping[Kind, int]
    stock_bytes: int
    kv_block_bytes: int = 0
    decode_steps: int = 0
    windows: int = 0
    flushes: int = 0
    records: int = 0
    replayed_records: int = 0
    rejected_records: int = 0
    traffic_bytes: int = 0
    stock_traffic_bytes: int = 0
    gpu: GpuStats | None = None

    def with_traffic(self, checkpoint_bytes: int, record_bytes: int) -> RankStats:
        """Return these statistics with the traffic that follows from the counters and the layout's bytes.

        A window reads the checkpoint and the records behind it, writes one record per token, and the checkpoint when
        it flushes. Stock LMDeploy reads a state per window and writes one per token of it. The positions, convolution
        states and whatever a kernel reads twice are left out on both sides.
        """
        records = self.records + self.replayed_records
        return replace(
            self,
            traffic_bytes=(self.windows + self.flushes) * checkpoint_bytes + records * record_bytes,
            stock_traffic_bytes=(self.windows + self.records) * checkpoint_bytes,
        )


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """One engine's state memory, capacity and counters. Counters start with the engine and only grow.

    Attributes:
        ranks: one entry per tensor-parallel rank.
        state_slots, state_slots_used: slots of the pool, and those that sequences or prefix checkpoints hold.
        checkpoint_slots: slots that prefix checkpoints hold; sequences get them when they need them.
        kv_blocks, kv_blocks_used: blocks of the paged KV cache, and those that sequences hold, each counted once.
        kv_blocks_free: blocks that neither sequences nor the prefix cache hold; LMDeploy keeps one for padding.
        kv_blocks_gained: blocks that the state memory saved amounts to on the rank that gains least; negative when
            ReplaySSM takes more than stock. None in a sleeping engine.
        invalidations, recomputed_tokens: by `InvalidationReason`.
        accepted_drafts: verified windows by the number of drafts accepted, 0 to all; empty without speculation.
    """

    ranks: tuple[RankStats, ...]
    state_slots: int
    state_slots_used: int
    kv_blocks: int
    kv_blocks_used: int
    kv_blocks_free: int
    kv_blocks_gained: int | None
    invalidations: Mapping[str, int]
    recomputed_tokens: Mapping[str, int]
    checkpoint_slots: int = 0
    accepted_drafts: tuple[int, ...] = ()
