"""The state of a causal convolution in a slot, on any device: what a prefill reads from it and writes to it.

N is the number of sequences, C of channels, W the width of the kernel, S the number of draft tokens. A slot holds the
last inputs of one sequence: a shift register `[C, W]`, or with drafts a ring `[C, W + S]` indexed by position modulo
W + S, so that rejected drafts are simply overwritten.
"""

from __future__ import annotations

from typing import Any

import torch


def read_history(conv_state: torch.Tensor, meta: Any) -> torch.Tensor:
    """Return the W - 1 inputs before each chunk, `[N, C, W - 1]`, zero where a sequence starts.

    Args:
        conv_state: `[slots, C, W (+ S)]`.
        meta: LMDeploy's `GatedDeltaMeta` of the forward.
    """
    if meta.spec_conv_offsets is None:
        history = conv_state[meta.state_ids, :, 1:]
    else:
        history = conv_state[ring_index(conv_state, meta.state_ids, meta.spec_conv_offsets[0])]
    return history.masked_fill_(meta.is_init[:, None, None], 0.0)


def write_tail(conv_state: torch.Tensor, tail: torch.Tensor, meta: Any) -> None:
    """Store the last W inputs of every sequence, `[N, C, W]`; `conv_state` is mutated in place."""
    tail = tail.to(conv_state.dtype)
    if meta.spec_conv_offsets is None:
        conv_state.index_copy_(0, meta.state_ids, tail)
    else:
        conv_state[ring_index(conv_state, meta.state_ids, meta.spec_conv_offsets[1])] = tail


def ring_index(conv_state: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Index `[N, C, offsets]` of a ring by slot `[N]`, channel and offset `[N, offsets]`."""
    channels = torch.arange(conv_state.size(1), device=conv_state.device)
    return slots[:, None, None], channels[None, :, None], offsets.long()[:, None, :]
