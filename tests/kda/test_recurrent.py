"""Decoding with whole states against the float64 recurrence: PyTorch's, and the kernel where the tests run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from replayssm.gdn.reference import recurrence
from replayssm.kda import reference, triton_recurrent
from tests.replay.interpreter import calling
from tests.replay.offline import compile_launch, stack_bytes

H, HV, K, V = 2, 4, 24, 40
SLOTS, SNAPSHOTS = [3, -1, 1], 4
HISTORY = [6, 0, 11]


@pytest.fixture(scope='module', params=['reference', 'triton_recurrent'])
def decode(request: pytest.FixtureRequest, device: str) -> Iterator[Callable[..., torch.Tensor]]:
    with calling(device) as call:
        name = f'replayssm.kda.{request.param}.recurrent_decode'
        yield lambda *operands: call(name, *operands)


def inputs(tokens: int, device: str) -> tuple[torch.Tensor, ...]:
    """q, k and v of one projection, the logits a and b, and what turns them into gates."""
    torch.manual_seed(tokens)
    batch = len(SLOTS)
    qkv = torch.randn(batch, tokens, 2 * H * K + HV * V, device=device).split([H * K, H * K, HV * V], -1)
    q, k, v = (x.unflatten(-1, heads) for x, heads in zip(qkv, ((H, K), (H, K), (HV, V)), strict=True))
    a, b = torch.randn(batch, tokens, HV, K, device=device), torch.randn(batch, tokens, HV, device=device)
    return q, k, v, a, b, -torch.rand(HV, device=device), torch.randn(HV, K, device=device)


def pool(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """States of one layer of three."""
    return torch.randn(5, 3, *shape, device=device).to(dtype)[:, 1]


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=['float32', 'bfloat16'])
@pytest.mark.parametrize('bound', [None, -5.0])
@pytest.mark.parametrize('tokens', [0, 1, 4], ids=['plain', 'one of a window', 'window'])
def test_it_equals_the_recurrence(
    tokens: int, bound: float | None, dtype: torch.dtype, decode: Callable[..., torch.Tensor], device: str
) -> None:
    snapshots = (SNAPSHOTS,) if tokens else ()
    tokens = max(tokens, 1)
    operands, states = inputs(tokens, device), pool(*snapshots, HV, V, K, dtype=dtype, device=device)
    slots, history = torch.tensor(SLOTS, device=device), torch.tensor(HISTORY, device=device) if snapshots else None
    expected, out = states.clone(), decode(*operands, states, slots, history, None, bound)
    for row, (slot, before) in enumerate(zip(SLOTS, HISTORY, strict=True)):
        if slot < 0:
            assert not out[row].any()
            continue
        q, k, v, a, b = (x[row : row + 1].double() for x in operands[:5])
        g, beta = reference.gates(a, b, operands[5].double(), operands[6], bound)
        start = expected[slot, before % SNAPSHOTS] if snapshots else expected[slot]
        outputs, after = recurrence(q, k, v, g, beta, start[None].double())
        torch.testing.assert_close(out[row].double(), outputs[0], rtol=1e-5, atol=1e-5)
        for step in range(tokens):
            place = (slot, (before + step + 1) % SNAPSHOTS) if snapshots else slot
            expected[place] = after[0, step].to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(states, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('capability', [80, 90, 100])
@pytest.mark.parametrize('head_dim', [64, 128, 256])
def test_it_compiles(head_dim: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, a = torch.empty(2, 4, 16, head_dim).bfloat16(), torch.empty(2, 4, 16, head_dim).bfloat16()
    operands: tuple[Any, ...] = (q, q, q, a, a[..., 0], torch.empty(16), torch.empty(16, head_dim))
    states, index = torch.empty(3, 4, 16, head_dim, head_dim), torch.zeros(2, dtype=torch.int64)
    launch, kernel = triton_recurrent.recurrent_decode, triton_recurrent._recurrent_kernel
    assert stack_bytes(compile_launch(monkeypatch, kernel, capability, launch, *operands, states, index, index)) == 0
