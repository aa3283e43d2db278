"""What GLM-5.3-Flash's target holds of one sequence before every step, whatever layout the slots have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from replayssm.cursor import read_prefill
from replayssm.kda.reference import materialise
from replayssm.models.glm5_next.model import Glm5NextForConditionalGeneration
from replayssm.patching import Patches
from tests.patch.logits import recorded_logits

CONV_INPUTS, POOL = 3, 4
"""What a convolution of width 4 still reads, and tokens of an index pool."""


class Held(NamedTuple):
    """State of a sequence of `tokens` committed tokens; tensors by layer."""

    tokens: int
    recurrent: list[torch.Tensor]
    """[H, V, K] each, the committed records folded in."""
    conv: list[torch.Tensor]
    """[C, 3] each, the newest inputs."""
    tail: list[torch.Tensor]
    """[tokens % 4, 2, dim] each, the tokens of the incomplete index pool."""
    pools: list[torch.Tensor]
    """[tokens // 4, dim] each, keys of complete pools."""
    latents: list[torch.Tensor]
    """[tokens, rank] each."""


class Step(NamedTuple):
    """One decode step of the target: what it found, and the logits [window, vocabulary] that it made."""

    held: Held
    logits: torch.Tensor


@contextmanager
def recorded_steps() -> Iterator[list[Step]]:
    """Yield a list that is filled, when the context ends, with the decode steps of the engine's only sequence."""
    steps: list[Step] = []
    found: list[Held | None] = []
    patches = Patches()

    @patches.wrap(Glm5NextForConditionalGeneration, 'prepare_inputs_for_generation')
    def prepare(original: Any, self: Any, past_key_values: Any, inputs_embeds: Any = None, context: Any = None) -> Any:
        inputs = original(self, past_key_values, inputs_embeds, context)
        found.append(_held(self, inputs, context) if context.is_decoding else None)
        return inputs

    try:
        with recorded_logits() as logits:
            yield steps
        pairs = zip(found, logits, strict=True)
        steps += [Step(held, rows[0]) for held, rows in pairs if held is not None]
    finally:
        patches.undo()


def _held(model: Any, inputs: dict[str, Any], context: Any) -> Held:
    (slot,) = inputs['state_ids'].tolist()
    metadata = inputs['attn_metadata']
    history = metadata.kv_seqlens - metadata.q_seqlens
    tokens, blocks = int(history[0]), metadata.block_offsets[0].long()
    held = Held(tokens, [], [], [], [], [])
    for layer, cache in zip(model.language_model.layers, inputs['past_key_values'], strict=True):
        if layer.is_linear:
            conv, recurrent = cache
            held.recurrent.append(_recurrent(layer.self_attn, recurrent, slot, history, context, len(held.recurrent)))
            newest = torch.arange(tokens - CONV_INPUTS, tokens)
            # a register has its newest input last, a ring has it at its position
            is_ring = conv.size(-1) > CONV_INPUTS + 1
            held.conv.append(conv[slot][:, newest % conv.size(-1)] if is_ring else conv[slot][:, -CONV_INPUTS:].clone())
        else:
            latents, pools, tail = cache
            held.latents.append(latents[blocks].flatten(0, 1).squeeze(1)[:tokens])
            dim = layer.self_attn.indexer.dim
            held.pools.append(pools.view(pools.size(0), -1, dim)[blocks].flatten(0, 1)[: tokens // POOL])
            held.tail.append(tail[slot][torch.arange(tokens - tokens % POOL, tokens) % tail.size(1)])
    return held


def _recurrent(
    attention: Any, states: torch.Tensor, slot: int, history: torch.Tensor, context: Any, index: int
) -> torch.Tensor:
    layout = context.model_config.state_layout
    if context.model_config.replay:
        positions = context.state_caches[-1][[slot]]
        cursors = read_prefill(torch.tensor([slot]), history, positions, layout.ring_rows)
        state = layout.layer(context.state_caches, index)
        return materialise(state, cursors, *attention.gate_parameters, attention.lower_bound)[0]
    snapshots = states[slot]
    return (snapshots[int(history[0]) % snapshots.size(0)] if layout.num_drafts else snapshots).clone()
