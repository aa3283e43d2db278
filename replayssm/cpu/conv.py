"""The short causal depthwise convolution in front of a linear-attention layer.

Dimensions and the two forms of the state are those of `conv_state`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.causal_conv1d import CausalConv1dImpl
from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMeta

from replayssm.conv_state import read_history, ring_index, write_tail


class CpuCausalConv1dImpl(CausalConv1dImpl):
    """Causal convolution over packed prompts and over single decode steps."""

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv_state: torch.Tensor,
        gated_delta_meta: GatedDeltaMeta,
        activation: str,
    ) -> torch.Tensor:
        """Return `[1, T, C]` of `x` `[1, T, C]`; `conv_state` `[slots, C, W (+ S)]` is mutated in place."""
        weight = weight.flatten(1)
        if gated_delta_meta.is_decoding:
            return self.decode(x, weight, bias, conv_state, gated_delta_meta, activation)
        return self.prefill(x, weight, bias, conv_state, gated_delta_meta, activation)

    def prefill(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv_state: torch.Tensor,
        meta: GatedDeltaMeta,
        activation: str,
    ) -> torch.Tensor:
        """Convolve packed prompts, each continuing from its slot unless it starts there."""
        initial = read_history(conv_state, meta)
        final = self.final_window(x, initial, meta)
        write_tail(conv_state, final, meta)
        return self.conv1d_fn(
            x.transpose(-2, -1), weight, bias, seq_idx=meta.seq_idx, initial_states=initial, activation=activation
        ).transpose(-2, -1)

    @staticmethod
    def final_window(x: torch.Tensor, initial: torch.Tensor, meta: GatedDeltaMeta) -> torch.Tensor:
        """Return the last W inputs of every sequence, `[N, C, W]`, by LMDeploy's own index.

        That index is wrong for a chunk of fewer than W tokens, as it is on a GPU.

        Args:
            x: `[1, T, C]`.
            initial: `[N, C, W - 1]`, the inputs before the chunk.
        """
        return x[0, meta.conv_idx].transpose(-2, -1)

    def decode(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv_state: torch.Tensor,
        meta: GatedDeltaMeta,
        activation: str,
    ) -> torch.Tensor:
        """Convolve the same number of new tokens of every sequence."""
        batch = x[0].unflatten(0, (meta.conv_state_indices.size(0), -1)).transpose(1, 2)
        out = self.update_fn(batch, conv_state, weight, bias, activation, meta.conv_state_indices, meta.cache_seqlens)
        return out.transpose(1, 2).flatten(0, 1)[None]

    def conv1d_fn(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        return_final_states: bool = False,
        activation: str | None = None,
    ) -> torch.Tensor:
        """Return `[1, C, T]`.

        Args:
            x: `[1, C, T]`, sequences one after another.
            weight: `[C, W]`.
            seq_idx: `[1, T]`, the sequence of every token, ascending.
            initial_states: `[N, C, W - 1]`.
        """
        if seq_idx is None or initial_states is None or return_final_states:
            raise NotImplementedError("device type 'cpu' convolves packed prompts with initial states")
        num_sequences, num_channels, history = initial_states.shape
        # Every sequence gets its history in front, and one pass convolves them all.
        token_row = torch.arange(x.size(-1)) + (seq_idx[0] + 1) * history
        is_history = torch.ones(x.size(-1) + num_sequences * history, dtype=torch.bool)
        is_history[token_row] = False
        rows = x.new_empty(is_history.numel(), num_channels)
        rows[token_row] = x[0].T
        rows[is_history] = initial_states.transpose(1, 2).reshape(-1, num_channels).to(x.dtype)
        out = _weighted_window(rows.T, weight, bias, activation)
        return out[:, token_row - history][None]

    def update_fn(
        self,
        x: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        conv_state_indices: torch.Tensor | None = None,
        cache_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `[N, C, Q]` of `x` `[N, C, Q]`; `conv_state` is mutated in place.

        Args:
            conv_state: `[slots, C, W (+ S)]`.
            weight: `[C, W]`.
            conv_state_indices: `[N]`, the slot of every sequence; a negative one leaves every slot as it is.
            cache_seqlens: `[N]`, the tokens before `x`, when the state is a ring.
        """
        if conv_state_indices is None:
            raise NotImplementedError("device type 'cpu' updates the conv state by slot")
        slots = conv_state_indices.long()
        history = weight.size(-1) - 1
        if cache_seqlens is None:
            previous = conv_state[slots.clamp(min=0)].to(x.dtype)
            window = torch.cat((previous, x), dim=-1)
            _store(conv_state, slots, window[..., -conv_state.size(-1) :])
            window = window[..., -(history + x.size(-1)) :]
        else:
            position = cache_seqlens.long()[:, None]
            read = (position + torch.arange(-history, 0)) % conv_state.size(-1)
            write = (position + torch.arange(x.size(-1))) % conv_state.size(-1)
            previous = conv_state[ring_index(conv_state, slots.clamp(min=0), read)].to(x.dtype)
            window = torch.cat((previous, x), dim=-1)
            _store_ring(conv_state, slots, write, x)
        return _weighted_window(window, weight, bias, activation)


def _store(conv_state: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor) -> None:
    valid = slots >= 0
    if not valid.all():
        slots, columns = slots[valid], columns[valid]
    conv_state.index_copy_(0, slots, columns.to(conv_state.dtype))


def _store_ring(conv_state: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, columns: torch.Tensor) -> None:
    valid = slots >= 0
    if not valid.all():
        slots, offsets, columns = slots[valid], offsets[valid], columns[valid]
    conv_state[ring_index(conv_state, slots, offsets)] = columns.to(conv_state.dtype)


def _weighted_window(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Slide `weight` `[C, W]` over the last dimension of `x` `[..., C, T + W - 1]`, accumulated in float32."""
    width = weight.size(-1)
    length = x.size(-1) - width + 1
    x, taps = x.float(), weight.float().unsqueeze(-1).unbind(1)
    out = x[..., :length] * taps[0]
    for offset in range(1, width):
        out = torch.addcmul(out, x[..., offset : offset + length], taps[offset])
    if bias is not None:
        out = out + bias.float()[:, None]
    if activation in ('silu', 'swish'):
        out = F.silu(out)
    elif activation is not None:
        raise NotImplementedError(f"device type 'cpu' has no convolution with activation {activation!r}")
    return out.to(weight.dtype)
