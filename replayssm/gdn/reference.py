"""Gated DeltaNet in PyTorch: the plain recurrence, and decoding by replay. README.md derives the equations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from replayssm.cursor import FLUSH, LENGTH, READ_ROW, SLOT, VALID, WRITE_ROW
from replayssm.layout import LayerState

NORM_EPS = 1e-6
"""Inside the root of the l2 norm of q and k."""


def gates(
    a: torch.Tensor, b: torch.Tensor, neg_exp_a: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-space gate g = neg_exp_a * softplus(a + dt_bias) and beta = sigmoid(b), in the dtype of `neg_exp_a`.

    Args:
        a, b: [..., HV] raw logits.
        neg_exp_a: [HV], -exp(A_log).
        dt_bias: [HV].
    """
    dtype = neg_exp_a.dtype
    return neg_exp_a * F.softplus(a.to(dtype) + dt_bias.to(dtype)), b.to(dtype).sigmoid()


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule token by token, computed in the dtype of `state`.

    Args:
        q, k: [B, T, H, K], before the l2 norm.
        v: [B, T, HV, V].
        g: [B, T, HV], log space; [B, T, HV, K], a gate per key channel, makes it Kimi Delta Attention.
        beta: [B, T, HV], after the sigmoid.
        state: [B, HV, V, K].
        scale: of q, K**-0.5 unless given.

    Returns:
        Outputs [B, T, HV, V] and the states after every token [B, T, HV, V, K].
    """
    dtype, heads = state.dtype, v.size(2) // k.size(2)
    scale = k.size(-1) ** -0.5 if scale is None else scale
    q = (normalise(q.to(dtype)) * scale).repeat_interleave(heads, 2)
    k = normalise(k.to(dtype)).repeat_interleave(heads, 2)
    g = g if g.dim() == k.dim() else g[..., None]
    outputs, states = [], []
    for t in range(q.size(1)):
        state = state * g[:, t, :, None].to(dtype).exp()
        delta = beta[:, t, :, None].to(dtype) * (v[:, t].to(dtype) - _matvec(state, k[:, t]))
        state = state + delta[..., None] * k[:, t, :, None, :]
        outputs.append(_matvec(state, q[:, t]))
        states.append(state)
    return torch.stack(outputs, 1), torch.stack(states, 1)


def replay_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    neg_exp_a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: LayerState,
    cursors: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """One decode step (T = 1) or the verification of a window of drafts (T > 1) by replay.

    Reads checkpoint and committed records, appends the window's records at the cursors' write rows, and rewrites the
    checkpoint of flushing rows. `state` is mutated in place; slots that `cursors` does not name stay untouched.

    Args:
        q, k: [B, T, H, K] activations before the l2 norm; any strides with a contiguous last dimension.
        v: [B, T, HV, V].
        a, b: [B, T, HV] raw logits of gate and beta.
        neg_exp_a, dt_bias: [HV] float32; float64 computes everything in float64.
        state: views of one layer, see `LayerState`.
        cursors: int32 [B, CURSOR_COLUMNS] from `cursor.advance_decode`.
        scale: of q, K**-0.5 unless given.

    Returns:
        [B, T, HV, V] in the dtype of v; zero for padding rows and behind a row's length.
    """
    dtype, heads = neg_exp_a.dtype, v.size(2) // k.size(2)
    scale = k.size(-1) ** -0.5 if scale is None else scale
    out = v.new_zeros(v.shape)
    rows = (cursors[:, SLOT] >= 0).nonzero().squeeze(-1)
    if rows.numel() == 0:
        return out
    cursors = cursors[rows].long()
    steps = torch.arange(q.size(1), device=q.device)
    inside = steps < cursors[:, LENGTH, None]

    raw_k, v = k[rows], v[rows].to(dtype)
    key_norm = inverse_norm(raw_k.to(dtype))
    key = (raw_k.to(dtype) * key_norm[..., None]).repeat_interleave(heads, 2)
    query = (normalise(q[rows].to(dtype)) * scale).repeat_interleave(heads, 2)
    g, beta = gates(a[rows], b[rows], neg_exp_a, dt_bias)
    g, beta = g.masked_fill(~inside[..., None], 0), beta.masked_fill(~inside[..., None], 0)
    gate = g.cumsum(1)

    ring = _Records(state, cursors, dtype)
    on_key = ring.project(key) * gate.exp()[..., None]
    on_query = ring.project(query) * gate.exp()[..., None]
    decay = _causal_decay(gate)
    key_key = torch.einsum('bihk,bjhk->bhij', key, key) * decay
    query_key = torch.einsum('bihk,bjhk->bhij', query, key) * decay
    delta = solve_window(v - on_key, key_key, beta)
    result = on_query + torch.einsum('bhij,bjhv->bihv', query_key, delta)
    out[rows] = result.masked_fill(~inside[..., None, None], 0).to(out.dtype)

    flush = cursors[:, FLUSH] > 0
    if bool(flush.any()):
        state.checkpoint[cursors[flush, SLOT]] = ring.fold()[flush].to(state.checkpoint.dtype)
    base = torch.where(flush[:, None], 0, ring.gate_sum)
    batch, step = inside.nonzero().unbind(-1)
    slots = cursors[batch, SLOT]
    ring_rows = (cursors[batch, WRITE_ROW] + step) % state.gate.size(-1)
    state.key[slots, :, ring_rows] = raw_k[batch, step].to(state.key.dtype)
    state.key_norm[slots, :, ring_rows] = key_norm[batch, step].to(state.key_norm.dtype)
    state.delta[slots, :, ring_rows] = delta[batch, step].to(state.delta.dtype)
    state.gate[slots, :, ring_rows] = (base[:, None] + gate)[batch, step].to(state.gate.dtype)
    return out


def materialise(state: LayerState, cursors: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """States with all committed records folded in: [B, HV, V, K] in `dtype`; zero for rows without a slot.

    Reads `state` only. `cursors` comes from either function of `cursor`.
    """
    states = _Records(state, cursors.long(), dtype).fold()
    return torch.where((cursors[:, SLOT] >= 0)[:, None, None, None], states, 0)


class _Records:
    """Checkpoint and committed records of a batch, gathered. Dead rows may hold NaN and are selected away."""

    def __init__(self, state: LayerState, cursors: torch.Tensor, dtype: torch.dtype) -> None:
        ring_rows, heads = state.gate.size(-1), state.gate.size(1) // state.key.size(1)
        slots, valid = cursors[:, SLOT].clamp_min(0), cursors[:, VALID]
        index = torch.arange(ring_rows, device=cursors.device)
        live = index < valid[:, None]
        at = (slots[:, None], slice(None), (cursors[:, READ_ROW, None] + index) % ring_rows)
        gate = torch.where(live[..., None], state.gate[at].to(dtype), 0)
        last = (valid - 1).clamp_min(0)[:, None, None].expand(-1, 1, gate.size(-1))
        self.gate_sum = gate.gather(1, last).squeeze(1)
        key = state.key[at].to(dtype) * state.key_norm[at].to(dtype)[..., None]
        self.key = torch.where(live[..., None, None], key, 0).repeat_interleave(heads, 2)
        delta = torch.where(live[..., None, None], state.delta[at].to(dtype), 0)
        self.delta = delta * (self.gate_sum[:, None] - gate).exp()[..., None]
        self.checkpoint = state.checkpoint[slots].to(dtype)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """State times x: [B, T, HV, K] -> [B, T, HV, V], records replayed without forming the state."""
        kept = torch.einsum('bhvk,bthk->bthv', self.checkpoint, x) * self.gate_sum.exp()[:, None, :, None]
        return kept + torch.einsum('bjhv,bhjt->bthv', self.delta, torch.einsum('bjhk,bthk->bhjt', self.key, x))

    def fold(self) -> torch.Tensor:
        """The state itself: [B, HV, V, K]."""
        kept = self.checkpoint * self.gate_sum.exp()[..., None, None]
        return kept + torch.einsum('bjhv,bjhk->bhvk', self.delta, self.key)


def solve_window(residual: torch.Tensor, key_key: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Forward substitution: d_i = beta_i (residual_i - sum over j < i of key_key_ij d_j).

    Args:
        residual: [B, T, HV, V], values less what the state before the window says.
        key_key: [B, HV, T, T], decayed products of the window's keys.
        beta: [B, T, HV].
    """
    deltas: list[torch.Tensor] = []
    for i in range(residual.size(1)):
        delta = residual[:, i]
        for j, earlier in enumerate(deltas):
            delta = delta - key_key[:, :, i, j, None] * earlier
        deltas.append(beta[:, i, :, None] * delta)
    return torch.stack(deltas, 1)


def inverse_norm(x: torch.Tensor) -> torch.Tensor:
    """1 / |x| over the last dimension, NORM_EPS inside the root."""
    return (x.square().sum(-1) + NORM_EPS).rsqrt()


def normalise(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last dimension."""
    return x * inverse_norm(x)[..., None]


def _causal_decay(gate: torch.Tensor) -> torch.Tensor:
    """e^(G_i - G_j) for j <= i, else 0: [B, T, HV] -> [B, HV, T, T]; the exponent is never positive."""
    gate = gate.transpose(1, 2)
    difference = gate[..., :, None] - gate[..., None, :]
    return difference.tril().exp().tril()


def _matvec(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return torch.einsum('bhvk,bhk->bhv', matrix, vector)
