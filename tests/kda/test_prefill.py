"""Chunks of packed prompts against the plain recurrence in float64."""

from __future__ import annotations

import pytest
import torch

from replayssm.gdn.reference import recurrence
from replayssm.kda.prefill import prefill
from replayssm.kda.reference import gates

LENGTHS = (1, 2, 15, 16, 17, 40, 65)


@pytest.mark.parametrize('bound', [None, -5.0])
@pytest.mark.parametrize('keys', ['random', 'near-collinear'])
def test_packed_prompts_equal_the_recurrence(bound: float | None, keys: str) -> None:
    """Near-collinear keys make the triangular system of a chunk badly conditioned."""
    torch.manual_seed(0)
    tokens, heads, key_dim, value_dim = sum(LENGTHS), 2, 16, 24
    q, k, a = (torch.randn(tokens, heads, key_dim) for _ in range(3))
    if keys == 'near-collinear':
        k = torch.randn(1, heads, key_dim) + 1e-3 * k
    v, b = torch.randn(tokens, heads, value_dim), torch.randn(tokens, heads) + 2
    g, beta = gates(a, b, -torch.tensor([1.0, 0.5]), torch.randn(heads, key_dim) - 4, bound)
    state = torch.randn(len(LENGTHS), heads, value_dim, key_dim)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    out, states = prefill(q, k, v, g, beta, state, bounds)
    for i, (start, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:], strict=False)):
        rows = (x[None, start:end] for x in (q, k, v, g, beta))
        expected, steps = recurrence(*rows, state[i : i + 1].double())
        torch.testing.assert_close(out[start:end].double(), expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states[i].double(), steps[0, -1], rtol=1e-4, atol=1e-4)
