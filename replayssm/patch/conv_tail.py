"""Save the right convolution state after a prompt, or a last chunk of one, that is shorter than the kernel.

N is the number of sequences, C of channels, W the width of the kernel, T the tokens of all sequences packed.

A prefill saves the last W inputs of every sequence for its next step. LMDeploy takes them from the packed tokens alone,
so a chunk of fewer than W tokens saves the end of its neighbour in the batch. The missing ones are older than the
chunk: they are in the state that it started from, or zero where a sequence starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from lmdeploy.pytorch.backends.cuda.causal_conv1d import CausalConv1dTilelangImpl
from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMeta

from replayssm.conv_state import read_history, write_tail
from replayssm.cpu.conv import CpuCausalConv1dImpl
from replayssm.patching import Patches


@dataclass(frozen=True, slots=True)
class TailIndex:
    """Where the last W inputs of every sequence are found.

    Attributes:
        token: [N, W] int64, index into the packed tokens; meaningless where `is_older`.
        column: [N, W] int64, index into the W - 1 inputs before the chunk; meaningless unless `is_older`.
        is_older: [N, W] bool, whether the input precedes the chunk.
    """

    token: torch.Tensor
    column: torch.Tensor
    is_older: torch.Tensor


def install(patches: Patches) -> None:
    """Replace the prefill of the CUDA convolutions (TileLang's and, by inheritance, Dao's) and of the CPU's."""
    patches.set(GatedDeltaMeta, '__init__', _index_tails(GatedDeltaMeta.__init__))
    patches.set(CausalConv1dTilelangImpl, '_prefill', _prefill)
    patches.set(CpuCausalConv1dImpl, 'final_window', staticmethod(_final_window))


def tail_index(cu_seqlens: torch.Tensor, width: int) -> TailIndex:
    """Return where the last `width` inputs of every packed sequence are found; never waits for the device.

    Args:
        cu_seqlens: [N + 1] integer, cumulative lengths of the chunks in tokens.
        width: W, at least 2.
    """
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    offset = torch.arange(-width, 0, device=cu_seqlens.device)
    token = ends[:, None] + offset
    since_start = token - starts[:, None]
    column = (since_start + width - 1).clamp(0, width - 2)
    return TailIndex(token=token.clamp_min(0), column=column, is_older=since_start < 0)


def conv_tail(x: torch.Tensor, initial: torch.Tensor, index: TailIndex) -> torch.Tensor:
    """Return the last W inputs of every sequence, `[N, C, W]`, oldest first.

    Args:
        x: `[1, T, C]`, packed inputs.
        initial: `[N, C, W - 1]`, the inputs before each chunk, oldest first, zero where a sequence starts.
        index: from `tail_index` for the same sequences.
    """
    recent = x[0, index.token].transpose(-2, -1)
    older = initial.gather(-1, index.column[:, None].expand(-1, initial.size(1), -1))
    return torch.where(index.is_older[:, None], older, recent)


def _index_tails(init: Callable[..., None]) -> Callable[..., None]:
    """Compute the index once for all layers of a forward; decode steps, which are captured in graphs, need none."""

    @wraps(init)
    def wrapper(self: Any, num_tokens: int, conv_kernel_size: int, *args: Any, **kwargs: Any) -> None:
        init(self, num_tokens, conv_kernel_size, *args, **kwargs)
        if not self.is_decoding:
            self.tail_index = tail_index(self.cu_seqlens, conv_kernel_size)

    return wrapper


def _final_window(x: torch.Tensor, initial: torch.Tensor, meta: Any) -> torch.Tensor:
    return conv_tail(x, initial, meta.tail_index)


def _prefill(
    self: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    gated_delta_meta: Any,
    activation: str,
) -> torch.Tensor:
    """Convolve packed chunks and save their tails: `CausalConv1dTilelangImpl._prefill` with `conv_tail` in it.

    Args:
        x: `[1, T, C]`.
        weight: `[C, W]` or `[C, 1, W]`.
        conv_state: `[slots, C, W]`, or with S draft tokens a ring `[slots, C, W + S]` indexed by position modulo its
            length; mutated in place.
    """
    meta = gated_delta_meta
    initial = read_history(conv_state, meta)
    write_tail(conv_state, conv_tail(x, initial, meta.tail_index), meta)
    output: torch.Tensor = self.conv1d_fn(
        x.transpose(-2, -1),
        weight[:, 0] if weight.dim() == 3 else weight,
        bias,
        seq_idx=meta.seq_idx,
        initial_states=initial,
        return_final_states=False,
        activation=activation,
    )
    return output.transpose(-2, -1)
