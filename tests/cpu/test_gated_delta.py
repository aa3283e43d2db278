"""The gated delta rule in chunks and in steps against the plain recurrence in float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from replayssm.cpu.gated_delta import RESET_GATE, CpuGatedDeltaRuleImpl, chunk_gated_delta_rule


@dataclass(frozen=True, slots=True)
class Inputs:
    """q and k `[T, H, K]`, v `[T, HV, V]`, g and beta `[T, HV]`, states `[N, HV, V, K]`, all float64."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    lens: tuple[int, ...]

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.tensor([0, *self.lens]).cumsum(0)


HEADS = {'gqa': (2, 4, 32, 32), 'odd': (2, 6, 16, 48), 'mha': (3, 3, 24, 8)}


def _inputs(lens: tuple[int, ...], heads: str, gate_scale: float = 1.0) -> Inputs:
    num_heads, num_value_heads, key_dim, value_dim = HEADS[heads]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_tokens = sum(lens)
    return Inputs(
        q=normal(num_tokens, num_heads, key_dim),
        k=normal(num_tokens, num_heads, key_dim),
        v=normal(num_tokens, num_value_heads, value_dim),
        g=-gate_scale * normal(num_tokens, num_value_heads).abs(),
        beta=normal(num_tokens, num_value_heads).sigmoid(),
        state=normal(len(lens), num_value_heads, value_dim, key_dim),
        lens=lens,
    )


def _recurrence(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[T, HV, V]` and the state after every token, `[T, HV, V, K]`, straight from the definition."""
    ratio = x.v.size(1) // x.q.size(1)
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (x.q, x.k))
    q, k = q.repeat_interleave(ratio, 1) * x.q.size(-1) ** -0.5, k.repeat_interleave(ratio, 1)
    outs, states = [], []
    for sequence, (start, end) in enumerate(pairwise(x.cu_seqlens.tolist())):
        state = x.state[sequence]
        for t in range(start, end):
            state = state * x.g[t].exp()[:, None, None]
            delta = x.beta[t][:, None] * (x.v[t] - torch.einsum('hvk,hk->hv', state, k[t]))
            state = state + torch.einsum('hv,hk->hvk', delta, k[t])
            outs.append(torch.einsum('hvk,hk->hv', state, q[t]))
            states.append(state)
    return torch.stack(outs), torch.stack(states)


def _last(states: torch.Tensor, x: Inputs) -> torch.Tensor:
    return states[x.cu_seqlens[1:] - 1]


@pytest.mark.parametrize('heads', list(HEADS))
@pytest.mark.parametrize('lens', [(1,), (63,), (64,), (65,), (1, 130, 17, 64)], ids=str)
@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-10), (torch.float32, 2e-5)], ids=str)
def test_chunks_equal_recurrence(lens: tuple[int, ...], heads: str, dtype: torch.dtype, tolerance: float) -> None:
    x = _inputs(lens, heads)
    expected, states = _recurrence(x)
    out, state = chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, x.state.to(dtype), x.cu_seqlens, use_qk_l2norm=True)
    assert out.dtype == state.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(state.double(), _last(states, x), atol=tolerance, rtol=tolerance)


def test_strong_gates_do_not_overflow() -> None:
    x = _inputs((130,), 'gqa', gate_scale=50.0)
    expected, _ = _recurrence(x)
    out, _ = chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, x.state.float(), x.cu_seqlens, use_qk_l2norm=True)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


def test_state_is_carried_from_call_to_call() -> None:
    x = _inputs((100,), 'odd')
    whole, final = chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, x.state, x.cu_seqlens, use_qk_l2norm=True)
    outs, state = [], x.state
    for part in (slice(0, 3), slice(3, 70), slice(70, 100)):
        length = part.stop - part.start
        out, state = chunk_gated_delta_rule(
            x.q[part],
            x.k[part],
            x.v[part],
            x.g[part],
            x.beta[part],
            state,
            torch.tensor([0, length]),
            use_qk_l2norm=True,
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), whole)
    torch.testing.assert_close(state, final)


def _prefill(
    x: Inputs, pool: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, **options: object
) -> torch.Tensor:
    g = x.g.clone()
    g[x.cu_seqlens[:-1][starts]] = RESET_GATE
    q, k, v, g, beta = (y.float()[None] for y in (x.q, x.k, x.v, g, x.beta))
    out, _ = CpuGatedDeltaRuleImpl().chunk_gated_delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=pool,
        state_indices=slots,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=x.cu_seqlens,
        transpose_state_layout=True,
        **options,
    )
    return out[0]


def test_prefill_resets_poisoned_slots() -> None:
    x = _inputs((5, 70, 9), 'odd')
    starts = torch.tensor([True, False, True])
    pool = torch.full((6, *x.state.shape[1:]), torch.nan)
    slots = torch.tensor([4, 1, 2])
    pool[1] = x.state[1]
    x.state[starts] = 0
    # The decay of a state of zeros is lost with the gate that asks for it.
    x.g[x.cu_seqlens[:-1][starts]] = 0
    out = _prefill(x, pool, slots, starts)
    expected, states = _recurrence(x)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(pool[slots].double(), _last(states, x), atol=2e-5, rtol=2e-5)
    assert pool[[0, 3, 5]].isnan().all()


def test_prefill_reads_and_writes_snapshots() -> None:
    x = _inputs((5, 70), 'gqa')
    pool = torch.full((3, 4, *x.state.shape[1:]), torch.nan)
    slots, read, write = torch.tensor([2, 1]), torch.tensor([3, 0]), torch.tensor([0, 2])
    pool[slots, read] = x.state.float()
    out = _prefill(x, pool, slots, torch.tensor([False, False]), spec_state_offsets=(read, write))
    expected, states = _recurrence(x)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(pool[slots, write].double(), _last(states, x), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize('heads', list(HEADS))
@pytest.mark.parametrize('num_drafts', [0, 1, 3, 7])
def test_decode_equals_recurrence(heads: str, num_drafts: int) -> None:
    """Ragged ring positions, and one padding row between two poisoned slots."""
    x = _inputs((1 + num_drafts,) * 3, heads)
    expected, states = _recurrence(x)
    q, k, v, g, beta = (y.float().unflatten(0, (3, -1)) for y in (x.q, x.k, x.v, x.g, x.beta))
    slots = torch.tensor([3, -1, 1])
    valid = slots >= 0
    seqlens = torch.tensor([6, 2, 11]) if num_drafts else None
    ring = 1 + num_drafts
    shape = (5, ring) if num_drafts else (5,)
    pool = torch.full((*shape, *x.state.shape[1:]), torch.nan)
    index = (slots[valid], seqlens[valid] % ring) if num_drafts else (slots[valid],)
    pool[index] = x.state[valid].float()
    pool[0] = 0
    before = pool.clone()
    out, _ = CpuGatedDeltaRuleImpl().fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=pool,
        state_indices=slots,
        use_qk_l2norm_in_kernel=True,
        cache_seqlens=seqlens,
        transpose_state_layout=True,
    )
    expected, states = expected.unflatten(0, (3, -1)), states.unflatten(0, (3, -1))
    torch.testing.assert_close(out[valid].double(), expected[valid], atol=2e-5, rtol=2e-5)
    for row in valid.nonzero().flatten().tolist():
        for step in range(ring):
            written = pool[slots[row], (seqlens[row] + 1 + step) % ring] if num_drafts else pool[slots[row]]
            torch.testing.assert_close(written.double(), states[row, step], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(pool[[0, 2, 4]], before[[0, 2, 4]], equal_nan=True)
