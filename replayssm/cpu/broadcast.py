"""Agreement of the ranks on sampled tokens, under gloo.

LMDeploy broadcasts four tensors under speculative decoding and waits for the last of them, which is enough where a
stream keeps their order. gloo's threads finish them in any order: a rank then drafts from a token that was not sampled,
or takes tokens and lengths of the step before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lmdeploy.pytorch.strategies.ar_spec.model_agent import ARSpecModelAgentStrategy

from replayssm.patching import Patches


def install(patches: Patches) -> None:
    """Wait for all of a step's broadcasts until `patches` is undone."""
    patches.set(ARSpecModelAgentStrategy, 'broadcast_next_token', broadcast_next_token)


@contextmanager
def broadcast_next_token(
    self: ARSpecModelAgentStrategy, next_token_ids: torch.Tensor, extra_inputs: Any, dist_ctx: Any
) -> Iterator[None]:
    """Broadcast what the first rank has sampled, which all ranks hold when the context ends; mutated in place.

    Args:
        next_token_ids: [N].
        extra_inputs: LMDeploy's `ARSpecExtraInputs`.
        dist_ctx: its distributed context.
    """
    group = dist_ctx.attn_tp_group.gpu_group
    source = dist.get_global_rank(group, 0)
    tensors = (
        next_token_ids,
        extra_inputs.last_token_indices,
        extra_inputs.output_token_ids,
        extra_inputs.num_rejected_tokens,
    )
    handles: list[Any] = [dist.broadcast(tensor, src=source, group=group, async_op=True) for tensor in tensors]
    yield
    for handle in handles:
        handle.wait()
