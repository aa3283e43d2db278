"""Cursors of one forward, computed when LMDeploy builds the metadata that all GDN layers of the forward share.

The slots' stored positions are advanced right there: layers read only the cursor table, and the next forward is the
next reader of the positions. Stream order, and a CUDA graph's replay, keep the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMeta
from lmdeploy.pytorch.model_inputs import get_step_ctx_manager

from replayssm.cursor import advance_decode, read_prefill
from replayssm.layout import LayerState, StateLayout
from replayssm.patch.schema import COUNTERS, layout_of
from replayssm.patching import Patches


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """What the GDN layers of one forward need: the pool's tensors and int32 [B, CURSOR_COLUMNS] cursors."""

    layout: StateLayout
    caches: list[torch.Tensor]
    cursors: torch.Tensor

    def layer_state(self, checkpoint: torch.Tensor) -> LayerState:
        """State of the layer whose [N, HV, V, K] checkpoint view LMDeploy's model code hands to its operator.

        The view's offset in the pool tells the layer, so that no numbering has to survive a rebuilt model.
        """
        pool = self.caches[1]
        index, rest = divmod(int(checkpoint.storage_offset() - pool.storage_offset()), pool.stride(1))
        assert rest == 0 and checkpoint.shape == pool.shape[:1] + pool.shape[2:]
        return self.layout.layer(self.caches, index)


def install(patches: Patches) -> None:
    """Make every `GatedDeltaMeta` carry a `ReplayStep` as `replay`, None where the model's slots are stock."""

    @patches.wrap(GatedDeltaMeta, '__init__')
    def init_meta(
        init: Any, self: Any, num_tokens: int, conv_kernel_size: int, state_ids: torch.Tensor, attn_metadata: Any
    ) -> None:
        init(self, num_tokens, conv_kernel_size, state_ids, attn_metadata)
        context = get_step_ctx_manager().current_context()
        layout = layout_of(context.model_config)
        self.replay = None if layout is None else _begin(context, layout, state_ids, attn_metadata)


def _begin(context: Any, layout: StateLayout, slots: torch.Tensor, attn_metadata: Any) -> ReplayStep:
    """Read the cursors of the batch's slots and advance what the slots store."""
    caches = context.state_caches
    stored = caches[-1]
    rows = slots.clamp_min(0)
    positions = stored[rows]
    lengths, end = attn_metadata.q_seqlens, attn_metadata.kv_seqlens
    history = end - lengths
    if attn_metadata.is_decoding:
        advance = advance_decode(slots, history, lengths, positions, layout.config.buffer_len, layout.ring_rows)
        table, positions = advance.table, advance.positions
        counts = [
            (advance.windows > 0).long(),
            advance.windows,
            advance.flushed,
            advance.appended,
            advance.replayed,
            advance.rejected,
        ]
        context.named_state_caches[COUNTERS].add_(torch.stack(counts))
    else:
        table = read_prefill(slots, history, positions, layout.ring_rows)
        positions = torch.where((slots >= 0)[:, None], end[:, None].to(positions.dtype), positions)
    # Padding rows write slot 0, which LMDeploy reserves, with what they read there.
    stored.index_copy_(0, rows, positions)
    return ReplayStep(layout, caches, table)
