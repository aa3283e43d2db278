"""Fused sparse attention against the gathered one: in Triton's interpreter on a CPU, compiled with --device cuda."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from replayssm.models.glm5_next import triton_attention
from replayssm.models.glm5_next.attention import attend_gathered
from replayssm.models.glm5_next.paging import Group
from tests.replay.offline import compile_launch, stack_bytes

SCALE, BLOCK = 0.3, 16
Attend = Callable[..., torch.Tensor]


@pytest.fixture
def attend(call: Callable[..., Any]) -> Attend:
    return partial(call, 'triton_attention.attend_fused')


def make_group(sequences: int, queries: int, pages: int, device: str) -> Group:
    """Sequences whose pages are all but page 0 of `sequences * pages + 1`, in random order."""
    blocks = torch.randperm(sequences * pages).view(sequences, pages) + 1
    position = torch.full((sequences, queries), pages * BLOCK - 1)
    tokens = slice(0, sequences * queries)
    return Group(tokens, blocks.to(device), position.to(device), position[:, -1].to(device) + 1, is_prompt=False)


def choose(group: Group, count: int) -> torch.Tensor:
    """[n, Q, count] different tokens of every query, a random part of them -1."""
    (n, queries), cached = group.position.shape, group.blocks.size(1) * BLOCK
    chosen = torch.stack([torch.randperm(cached)[:count] for _ in range(n * queries)])
    return chosen.masked_fill(torch.rand(chosen.shape) < 0.3, -1).view(n, queries, count).int().to(group.blocks.device)


@pytest.mark.parametrize('programs', [1, 7, 1000], ids='programs={}'.format)
@pytest.mark.parametrize(
    ('queries', 'heads', 'rank'), [(1, 16, 64), (4, 16, 512), (2, 3, 24), (1, 64, 512)], ids=['1', '4', 'odd', 'heads']
)
def test_it_equals_gathered_attention(
    queries: int, heads: int, rank: int, programs: int, attend: Attend, device: str
) -> None:
    torch.manual_seed(0)
    group = make_group(2, queries, 8, device)
    # Strides are those of LMDeploy's packed blocks and of a product with the heads' projections.
    latents = torch.randn(17, 2, BLOCK, rank, device=device)[:, 1]
    query = torch.randn(heads, 2 * queries, rank, device=device).transpose(0, 1).unflatten(0, (2, queries))
    selected = choose(group, 100)
    got = attend(query, selected, latents, group, rank**-0.5, programs)
    expected = attend_gathered(query.double(), selected, latents.double(), group, rank**-0.5)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.cuda
@pytest.mark.parametrize('queries', [1, 4])
def test_it_equals_gathered_attention_in_bf16(queries: int) -> None:
    torch.manual_seed(0)
    group = make_group(3, queries, 64, 'cuda')
    latents = torch.randn(3 * 64 + 1, BLOCK, 512, device='cuda').bfloat16()
    query, selected = torch.randn(3, queries, 16, 512, device='cuda').bfloat16(), choose(group, 1000)
    got = triton_attention.attend_fused(query, selected, latents, group, 1 / 16)
    expected = attend_gathered(query.float(), selected, latents.float(), group, 1 / 16)
    assert (got - expected).norm() < 1e-2 * expected.norm()


def test_what_is_not_chosen_is_not_read(attend: Attend, device: str) -> None:
    """Recycled pages may hold NaN; padding may choose tokens behind its page table, or none."""
    group = make_group(1, 3, 4, device)
    latents = torch.full((5, BLOCK, 32), float('nan'), device=device)
    mine = latents[group.blocks[0, 2]].normal_()
    latents[group.blocks[0, 2]] = mine
    selected = torch.full((1, 3, 40), -1, dtype=torch.int32, device=device)
    selected[0, 0, 33] = 2 * BLOCK + 5
    selected[0, 1] = 4 * BLOCK + torch.arange(40, device=device)
    out = attend(torch.randn(1, 3, 2, 32, device=device), selected, latents, group, SCALE, 100)
    torch.testing.assert_close(out[0, 0], mine[5].expand(2, -1))
    assert (out[0, 1:] == 0).all()


@pytest.mark.parametrize('kernel', ['_attend_kernel', '_merge_kernel'])
@pytest.mark.parametrize(('capability', 'shared_bytes'), [(80, 166912), (90, 232448), (100, 232448)])
def test_it_compiles(kernel: str, capability: int, shared_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (other,) = {'_attend_kernel', '_merge_kernel'} - {kernel}
    monkeypatch.setattr(getattr(triton_attention, other), 'run', lambda *_, **__: None)
    group = make_group(2, 4, 40, 'cpu')
    latents, query = (torch.empty(2, size, 512, dtype=torch.bfloat16) for size in (BLOCK, 256))
    launch = (triton_attention.attend_fused, query.view(2, 4, 64, 512), choose(group, 100), latents, group, SCALE)
    binary = compile_launch(monkeypatch, getattr(triton_attention, kernel), capability, *launch)
    assert stack_bytes(binary) == 0 or capability != 90
    assert binary.metadata.shared <= shared_bytes, 'what a program may have'
