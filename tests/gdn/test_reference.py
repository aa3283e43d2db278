"""The plain recurrence."""

from __future__ import annotations

import torch

from replayssm.gdn.reference import recurrence


def test_recurrence_returns_every_state() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 4, 6)
    g, beta, state = -torch.rand(2, 5, 4), torch.rand(2, 5, 4), torch.randn(2, 4, 6, 8).double()
    out, states = recurrence(q, k, v, g, beta, state)
    first, _ = recurrence(q[:, :3], k[:, :3], v[:, :3], g[:, :3], beta[:, :3], state)
    rest, _ = recurrence(q[:, 3:], k[:, 3:], v[:, 3:], g[:, 3:], beta[:, 3:], states[:, 2])
    torch.testing.assert_close(out, torch.cat([first, rest], 1))
