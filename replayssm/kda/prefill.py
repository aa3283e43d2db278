"""Kimi Delta Attention over packed prompts."""

from __future__ import annotations

import torch

from replayssm.gdn.reference import normalise

CHUNK_SIZE = 16
"""Tokens solved at once in PyTorch; every pair of them needs K decays."""


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the rule over packed sequences: on a GPU by flash-linear-attention, on a CPU in chunks.

    Args:
        q, k: [T, H, K], before the l2 norm.
        v: [T, H, V].
        g: [T, H, K], log space.
        beta: [T, H], after the sigmoid.
        state: [N, H, V, K] float32, the states before the first tokens; zero where a sequence starts.
        cu_seqlens: [N + 1], where each sequence starts and ends in T.

    Returns:
        [T, H, V] in the dtype of v, and the states after the last tokens [N, H, V, K]. Nothing is mutated.
    """
    if q.device.type == 'cpu':
        out, state = _chunked(q, k, v, g, beta, state, cu_seqlens)
        return out.to(v.dtype), state
    from fla.ops.kda import chunk_kda

    out, state = chunk_kda(
        q[None],
        k[None],
        v[None],
        g[None],
        beta[None],
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        state_v_first=True,
        # As it is: flash-linear-attention keeps what it derives from it, by identity, for the layers behind.
        cu_seqlens=cu_seqlens,
    )
    return out[0], state


def _chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = state.dtype
    lens = cu_seqlens.diff()
    num_chunks = -(-int(lens.max()) // CHUNK_SIZE)
    sequence = torch.repeat_interleave(lens, output_size=q.size(0))
    position = torch.arange(q.size(0)) - cu_seqlens.long()[sequence]

    def chunks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Rows past the end of a sequence are zero: a gate of one, no update, an output nobody reads.
        out = x.new_zeros(lens.numel(), num_chunks * CHUNK_SIZE, *x.shape[1:], dtype=dtype)
        out[sequence, position] = x.to(dtype)
        return out.transpose(1, 2).split(CHUNK_SIZE, 2)

    scale = k.size(-1) ** -0.5
    outs = []
    queries, keys = normalise(q.to(dtype)) * scale, normalise(k.to(dtype))
    for piece in zip(chunks(queries), chunks(keys), chunks(v), chunks(g), chunks(beta), strict=True):
        out, state = _chunk(*piece, state)
        outs.append(out)
    return torch.cat(outs, 2).transpose(1, 2)[sequence, position], state


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk [N, H, C, ...] from `state` [N, H, V, K]."""
    gate = g.cumsum(2)
    difference = gate[..., :, None, :] - gate[..., None, :, :]
    causal = torch.ones(gate.size(2), gate.size(2), dtype=torch.bool).tril()
    decay = difference.masked_fill(~causal[..., None], float('-inf')).exp()
    key_key = torch.einsum('nhik,nhjk,nhijk->nhij', k, k, decay)
    query_key = torch.einsum('nhik,nhjk,nhijk->nhij', q, k, decay)
    residual = beta[..., None] * (v - (k * gate.exp()) @ state.mT)
    system = (beta[..., None] * key_key).tril(-1)
    delta = torch.linalg.solve_triangular(system, residual, upper=False, unitriangular=True)
    out = (q * gate.exp()) @ state.mT + query_key @ delta
    to_end = k * (gate[..., -1:, :] - gate).exp()
    return out, state * gate[..., -1:, :].exp() + delta.mT @ to_end
