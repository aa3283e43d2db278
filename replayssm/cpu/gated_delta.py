"""The gated delta rule: `S <- e^g S; S <- S + beta (v - S k) k^T; o = S q`.

N is the number of sequences, T of tokens, H of query and key heads, HV of value heads (a multiple of H), K and V
the head sizes. States are kept transposed, `[..., HV, V, K]`. Gates are logarithms, `beta` is after the sigmoid.
"""

from __future__ import annotations

from typing import Any

import torch
from lmdeploy.pytorch.backends.gated_delta_rule import (
    GatedDeltaMeta,
    GatedDeltaMetaImpl,
    GatedDeltaRuleImpl,
)

from replayssm.gdn.reference import gates

CHUNK_SIZE = 64
RESET_GATE = -1.0e6
"""The gate by which LMDeploy asks for a zero state before a sequence's first token."""


class CpuGatedDeltaMetaImpl(GatedDeltaMetaImpl):
    """LMDeploy's own step metadata."""

    def forward(
        self, num_tokens: int, conv_kernel_size: int, state_ids: torch.Tensor, attn_metadata: Any
    ) -> GatedDeltaMeta:
        return GatedDeltaMeta(num_tokens, conv_kernel_size, state_ids, attn_metadata)


class CpuGatedDeltaRuleImpl(GatedDeltaRuleImpl):
    """Torch forms of the two kernels that LMDeploy's base class drives, both batched over the sequences."""

    def prepare_inputs(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        dt_bias: torch.Tensor,
        a_log_exp: torch.Tensor,
        kv_ratio: int,
        use_qk_l2norm_in_kernel: bool = False,
        is_decoding: bool = False,
        init_token_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        """Return q and k as they are and float32 g and beta, `[1, T, HV]`; the kernels repeat heads themselves."""
        if a.dim() == 4:
            a, b = a.flatten(-2), b.flatten(-2)
        g, beta = gates(a, b, a_log_exp, dt_bias)
        if init_token_mask is not None and not is_decoding:
            g = g.masked_fill(init_token_mask[None, :, None], RESET_GATE)
        return q, k, g, beta, False

    def chunk_gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        initial_state: torch.Tensor | None = None,
        state_indices: torch.Tensor | None = None,
        scale: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        output_final_state: bool = False,
        spec_state_offsets: tuple[torch.Tensor, torch.Tensor] | None = None,
        transpose_state_layout: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefill packed sequences.

        Args:
            q, k: `[1, T, H, K]`.
            v: `[1, T, HV, V]`.
            g, beta: `[1, T, HV]`. A gate of `RESET_GATE` on a sequence's first token starts it from a zero state; in a
                float32 cumulative sum it would leave no digits of the other gates and let a NaN through.
            initial_state: `[slots, HV, V, K]`, or `[slots, 1 + S, HV, V, K]` with `spec_state_offsets`; mutated in
                place.
            state_indices: `[N]`.
            spec_state_offsets: `[N]` each, the snapshots to read and to write.

        Returns:
            `[1, T, HV, V]` in the dtype of `v`, and `initial_state`.
        """
        if initial_state is None or state_indices is None or g is None or beta is None or cu_seqlens is None:
            raise NotImplementedError("device type 'cpu' needs gates, states by slot and sequence bounds")
        read: tuple[torch.Tensor, ...] = (state_indices,)
        write = read
        if spec_state_offsets is not None:
            read, write = ((state_indices, offsets.long()) for offsets in spec_state_offsets)
        starts = (g[0, cu_seqlens[:-1].long(), 0] == RESET_GATE)[:, None, None, None]
        out, state = self.chunk_func(
            q,
            k,
            v,
            g=g.masked_fill(g == RESET_GATE, 0.0),
            beta=beta,
            scale=scale,
            initial_state=initial_state[read].float().masked_fill(starts, 0.0),
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )
        initial_state[write] = state.to(initial_state.dtype)
        return out, initial_state

    @staticmethod
    def chunk_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        cu_seqlens: torch.Tensor,
        scale: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        output_final_state: bool = True,
        transpose_state_layout: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`chunk_gated_delta_rule` under the name and with the arguments of the CUDA operator's.

        Returns:
            `[1, T, HV, V]` in the dtype of `v`, and the states after the last tokens, `[N, HV, V, K]` float32.
        """
        out, state = chunk_gated_delta_rule(
            q[0],
            k[0],
            v[0],
            g[0],
            beta[0],
            initial_state,
            cu_seqlens,
            scale=scale,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
        )
        return out.to(v.dtype)[None], state

    def fused_recurrent_gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        initial_state: torch.Tensor | None = None,
        state_indices: torch.Tensor | None = None,
        scale: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        output_final_state: bool = False,
        cache_seqlens: torch.Tensor | None = None,
        transpose_state_layout: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance the state of every sequence by Q tokens.

        Args:
            q, k: `[N, Q, H, K]`.
            v: `[N, Q, HV, V]`.
            g, beta: `[N, Q, HV]`.
            initial_state: `[slots, HV, V, K]`, or `[slots, 1 + S, HV, V, K]` with `cache_seqlens`; mutated in place.
            state_indices: `[N]`, the slot of every sequence; a negative one leaves every slot as it is.
            cache_seqlens: `[N]`, the tokens before these. The snapshot after n tokens is at n modulo 1 + S, and the
                one after every single token is stored.

        Returns:
            `[N, Q, HV, V]` in the dtype of `v`, and `initial_state`.
        """
        if initial_state is None or state_indices is None or g is None or beta is None or not transpose_state_layout:
            raise NotImplementedError("device type 'cpu' needs gates and transposed states by slot")
        q, k, v_float = _normalised_heads(q, k, v, scale, use_qk_l2norm_in_kernel)
        slots = state_indices.long()
        index: tuple[torch.Tensor, ...] = (slots.clamp(min=0),)
        if cache_seqlens is not None:
            index = (*index, cache_seqlens.long() % initial_state.size(1))
        out, states = recurrent_gated_delta_rule(q, k, v_float, g.float(), beta.float(), initial_state[index].float())
        valid = slots >= 0
        all_valid = bool(valid.all())
        for step, state in enumerate(states if cache_seqlens is not None else states[-1:], start=1):
            index = (slots,)
            if cache_seqlens is not None:
                index = (slots, (cache_seqlens.long() + step) % initial_state.size(1))
            if not all_valid:
                index, state = tuple(i[valid] for i in index), state[valid]
            initial_state[index] = state.to(initial_state.dtype)
        return out.to(v.dtype), initial_state


def recurrent_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the outputs `[N, Q, HV, V]` and the state after every token, each `[N, HV, V, K]`.

    Args:
        q, k: `[N, Q, HV, K]`, scaled and normalised.
        v: `[N, Q, HV, V]`.
        g, beta: `[N, Q, HV]`.
        state: `[N, HV, V, K]`.
    """
    outs, states = [], []
    decay = g.exp()[..., None, None]
    q, k_row, k, v = q.unsqueeze(-1), k.unsqueeze(-2), k.unsqueeze(-1), v.unsqueeze(-1)
    beta = beta[..., None, None]
    for step in range(q.size(1)):
        state = state * decay[:, step]
        delta = (v[:, step] - state @ k[:, step]) * beta[:, step]
        state = state + delta * k_row[:, step]
        outs.append(state @ q[:, step])
        states.append(state)
    return torch.stack(outs, dim=1).squeeze(-1), states


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the rule over packed sequences in chunks, batched over the sequences.

    Within a chunk the delta rule is a unit lower triangular system (the WY form of the product of its Householder
    factors); only the state passes from chunk to chunk.

    Args:
        q, k: `[T, H, K]`, any float dtype.
        v: `[T, HV, V]`.
        g, beta: `[T, HV]`.
        state: `[N, HV, V, K]`, the states before the first tokens.
        cu_seqlens: `[N + 1]`, where each sequence starts and ends in T.
        scale: of the queries; `None` is `K ** -0.5`.
        use_qk_l2norm: normalise q and k first.

    Returns:
        `[T, HV, V]` and the states after the last tokens, `[N, HV, V, K]`, both in the dtype of `state`. Nothing is
        mutated.
    """
    dtype = state.dtype
    q, k, v = _normalised_heads(q, k, v, scale, use_qk_l2norm, dtype)
    lens = cu_seqlens.diff()
    num_chunks = -(-int(lens.max()) // chunk_size)
    sequence = torch.repeat_interleave(lens, output_size=q.size(0))
    position = torch.arange(q.size(0)) - cu_seqlens.long()[sequence]

    def padded(x: torch.Tensor) -> torch.Tensor:
        # Rows past the end of a sequence are zero: a gate of one, no update, an output nobody reads.
        out = x.new_zeros(lens.numel(), num_chunks * chunk_size, *x.shape[1:])
        out[sequence, position] = x
        return out.unflatten(1, (num_chunks, chunk_size)).transpose(2, 3)

    out, state = _chunks(
        padded(q), padded(k), padded(v), padded(g.to(dtype)), padded(beta.to(dtype)), state.transpose(-1, -2)
    )
    out = out.transpose(2, 3).flatten(1, 2)
    return out[sequence, position], state.transpose(-1, -2)


def _chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run chunks `[N, chunks, HV, C, ...]` from `state` `[N, HV, K, V]`."""
    size = q.size(3)
    g = g.cumsum(-1)
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~causal, float('-inf')).exp()
    g_exp = g.exp().unsqueeze(-1)
    k_beta = k * beta.unsqueeze(-1)
    system = ((k_beta @ k.mT) * decay).tril(-1)
    right = torch.cat((v * beta.unsqueeze(-1), k_beta * g_exp), dim=-1)
    update, correction = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        (v.size(-1), k.size(-1)), dim=-1
    )
    scores = (q @ k.mT) * decay
    q_decayed = q * g_exp
    k_to_end = (k * (g[..., -1:] - g).exp().unsqueeze(-1)).mT
    total_decay = g_exp[..., -1:, :]

    outs = []
    for chunk in range(q.size(1)):
        delta = update[:, chunk] - correction[:, chunk] @ state
        outs.append(q_decayed[:, chunk] @ state + scores[:, chunk] @ delta)
        state = state * total_decay[:, chunk] + k_to_end[:, chunk] @ delta
    return torch.stack(outs, dim=1), state


def _normalised_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    use_qk_l2norm: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q scaled, q and k l2-normalised on demand and repeated to HV heads, all in `dtype`."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q = q * (q.size(-1) ** -0.5 if scale is None else scale)
    ratio = v.size(-2) // q.size(-2)
    if ratio > 1:
        q, k = q.repeat_interleave(ratio, dim=-2), k.repeat_interleave(ratio, dim=-2)
    return q, k, v


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return `x / sqrt(sum(x^2) + eps)` over the last dimension."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + eps)
