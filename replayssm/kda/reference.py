"""Kimi Delta Attention in PyTorch: decoding by replay, and without it. README.md derives the equations.

The plain recurrence is `gdn.reference.recurrence` with gates [B, T, HV, K].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from replayssm.cursor import FLUSH, LENGTH, READ_ROW, SLOT, VALID, WRITE_ROW
from replayssm.gdn.reference import inverse_norm, normalise, recurrence, solve_window
from replayssm.layout import LayerState


def gates(
    a: torch.Tensor,
    b: torch.Tensor,
    neg_exp_a: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-space gates and beta = sigmoid(b), in the dtype of `neg_exp_a`.

    Softplus form: g = neg_exp_a * softplus(a + dt_bias). Bounded form: g = lower_bound * sigmoid(-neg_exp_a * (a +
    dt_bias)); the bound multiplies, it does not clamp.

    Args:
        a: [..., HV, K] raw logits.
        b: [..., HV] raw logits.
        neg_exp_a: [HV], -exp(A_log).
        dt_bias: [HV, K].
        lower_bound: negative; None is the softplus form.
    """
    dtype = neg_exp_a.dtype
    x, rate = a.to(dtype) + dt_bias.to(dtype), neg_exp_a[:, None]
    g = rate * F.softplus(x) if lower_bound is None else lower_bound * (-rate * x).sigmoid()
    return g, b.to(dtype).sigmoid()


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
    lower_bound: float | None = None,
) -> torch.Tensor:
    """One decode step (T = 1) or the verification of a window of drafts (T > 1) by replay.

    Reads checkpoint and committed records, appends the window's records at the cursors' write rows, and rewrites the
    checkpoint of flushing rows. `state` is mutated in place; slots that `cursors` does not name stay untouched.

    Args:
        q, k: [B, T, H, K] activations before the l2 norm; any strides with a contiguous last dimension.
        v: [B, T, HV, V].
        a: [B, T, HV, K] raw gate logits.
        b: [B, T, HV] raw logits of beta.
        neg_exp_a: [HV] float32; float64 computes everything in float64.
        dt_bias: [HV, K].
        state: views of one layer, see `LayerState`; `state.gate` holds raw logits.
        cursors: int32 [B, CURSOR_COLUMNS] from `cursor.advance_decode`.
        scale: of q, K**-0.5 unless given.
        lower_bound: of the gates, see `gates`.

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
    inside = torch.arange(q.size(1), device=q.device) < cursors[:, LENGTH, None]

    raw_k, raw_a, v = k[rows], a[rows], v[rows].to(dtype)
    key_norm = inverse_norm(raw_k.to(dtype))
    key = (raw_k.to(dtype) * key_norm[..., None]).repeat_interleave(heads, 2)
    query = (normalise(q[rows].to(dtype)) * scale).repeat_interleave(heads, 2)
    g, beta = gates(raw_a, b[rows], neg_exp_a, dt_bias, lower_bound)
    g, beta = g.masked_fill(~inside[..., None, None], 0), beta.masked_fill(~inside[..., None], 0)
    gate = g.cumsum(1)

    records = _Records(state, cursors, neg_exp_a, dt_bias, lower_bound)
    decay = _causal_decay(gate)
    key_key = torch.einsum('bihk,bjhk,bhijk->bhij', key, key, decay)
    query_key = torch.einsum('bihk,bjhk,bhijk->bhij', query, key, decay)
    delta = solve_window(v - records.project(key * gate.exp()), key_key, beta)
    result = records.project(query * gate.exp()) + torch.einsum('bhij,bjhv->bihv', query_key, delta)
    out[rows] = result.masked_fill(~inside[..., None, None], 0).to(out.dtype)

    flush = cursors[:, FLUSH] > 0
    if bool(flush.any()):
        state.checkpoint[cursors[flush, SLOT]] = records.fold()[flush].to(state.checkpoint.dtype)
    batch, step = inside.nonzero().unbind(-1)
    slots = cursors[batch, SLOT]
    ring_rows = (cursors[batch, WRITE_ROW] + step) % state.key_norm.size(-1)
    for ring, values in (
        (state.key, raw_k),
        (state.key_norm, key_norm),
        (state.delta, delta),
        (state.gate, raw_a),
    ):
        ring[slots, :, ring_rows] = values[batch, step].to(ring.dtype)
    return out


def recurrent_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    neg_exp_a: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """What `replay_decode` computes, without ReplaySSM: a state is rewritten after every token.

    Args:
        q, k, v, a, b, neg_exp_a, dt_bias, scale, lower_bound: as there.
        states: [N, HV, V, K], or with `history` [N, S, HV, V, K], where the state after n tokens is at n mod S, so that
            S - 1 drafts can be rejected; mutated in place.
        slots: [B] integer, negative for padding.
        history: [B] integer, tokens before the window.

    Returns:
        [B, T, HV, V] in the dtype of v; zero for padding rows.
    """
    out = v.new_zeros(v.shape)
    rows = (slots >= 0).nonzero().squeeze(-1)
    used = slots[rows].long()

    def place(step: int) -> tuple[torch.Tensor, ...]:
        return (used,) if history is None else (used, (history[rows].long() + step) % states.size(1))

    g, beta = gates(a[rows], b[rows], neg_exp_a, dt_bias, lower_bound)
    outputs, after = recurrence(q[rows], k[rows], v[rows], g, beta, states[place(0)].to(neg_exp_a.dtype), scale)
    for step in range(q.size(1)):
        states[place(step + 1)] = after[:, step].to(states.dtype)
    out[rows] = outputs.to(out.dtype)
    return out


def materialise(
    state: LayerState,
    cursors: torch.Tensor,
    neg_exp_a: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """States with all committed records folded in, [B, HV, V, K] in the dtype of `neg_exp_a`; zero without a slot.

    Reads `state` only. `cursors` comes from either function of `cursor`, the gates' parameters are `gates`'.
    """
    states = _Records(state, cursors.long(), neg_exp_a, dt_bias, lower_bound).fold()
    return torch.where((cursors[:, SLOT] >= 0)[:, None, None, None], states, 0)


class _Records:
    """Checkpoint and committed records of a batch, gathered. Dead rows may hold NaN and are selected away."""

    def __init__(
        self,
        state: LayerState,
        cursors: torch.Tensor,
        neg_exp_a: torch.Tensor,
        dt_bias: torch.Tensor,
        lower_bound: float | None,
    ) -> None:
        dtype = neg_exp_a.dtype
        ring_rows, heads = state.key_norm.size(-1), state.gate.size(1) // state.key.size(1)
        slots, valid = cursors[:, SLOT].clamp_min(0), cursors[:, VALID]
        index = torch.arange(ring_rows, device=cursors.device)
        live = (index < valid[:, None])[..., None, None]
        at = (slots[:, None], slice(None), (cursors[:, READ_ROW, None] + index) % ring_rows)
        logits = torch.where(live, state.gate[at], 0)
        gate = torch.where(live, gates(logits, logits[..., 0], neg_exp_a, dt_bias, lower_bound)[0], 0)
        # behind a record act the gates of the later ones: summed from the newest, so that no difference is formed
        until_now = gate.flip(1).cumsum(1).flip(1)
        after = F.pad(until_now[:, 1:], (0, 0, 0, 0, 0, 1))
        key = state.key[at].to(dtype) * state.key_norm[at].to(dtype)[..., None]
        self.key = torch.where(live, key, 0).repeat_interleave(heads, 2) * after.exp()
        self.delta = torch.where(live, state.delta[at].to(dtype), 0)
        self.checkpoint = state.checkpoint[slots].to(dtype) * until_now[:, 0].exp()[:, :, None]

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """State times x: [B, T, HV, K] -> [B, T, HV, V], records replayed without forming the state."""
        kept = torch.einsum('bhvk,bthk->bthv', self.checkpoint, x)
        return kept + torch.einsum('bjhv,bhjt->bthv', self.delta, torch.einsum('bjhk,bthk->bhjt', self.key, x))

    def fold(self) -> torch.Tensor:
        """The state itself: [B, HV, V, K]."""
        return self.checkpoint + torch.einsum('bjhv,bjhk->bhvk', self.delta, self.key)


def _causal_decay(gate: torch.Tensor) -> torch.Tensor:
    """e^(G_i - G_j) for j <= i, else 0: [B, T, HV, K] -> [B, HV, T, T, K]; the exponent is never positive."""
    gate = gate.transpose(1, 2)
    difference = gate[..., :, None, :] - gate[..., None, :, :]
    causal = torch.ones(gate.size(2), gate.size(2), dtype=torch.bool, device=gate.device).tril()[..., None]
    return torch.where(causal, difference, 0).exp() * causal
