"""The fused indexer against PyTorch's: in Triton's interpreter on a CPU, compiled with --device cuda."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from replayssm.models.glm5_next import indexer as reference
from replayssm.models.glm5_next import triton_indexer
from replayssm.models.glm5_next.paging import Paging, build_paging
from tests.replay.offline import compile_launch, stack_bytes

from .small_indexer import BLOCK, DIM, DRAFTS, HEADS, HIDDEN, POOL, ROWS, TOP_POOLS, local_indexer, step

Call = Callable[..., Any]
WINDOWS = pytest.mark.parametrize('window', [1, 1 + DRAFTS])


def padded_paging(history: list[int], window: int, device: str) -> Paging:
    """Two sequences, and a third of padding that names the first one's pages."""
    blocks = torch.tensor([[0, 2, 7, 1, 3], [6, 4, 8, 5, 3]])
    metadata = step([*history, 0], window, True, F.pad(blocks, (0, 3, 0, 1)))
    moved = {k: v if isinstance(v, bool) else v.to(device) for k, v in vars(metadata).items()}
    return build_paging(SimpleNamespace(**moved), torch.tensor([1, 2, -1], device=device), 3 * window, BLOCK)


def packed(*shape: int, device: str) -> torch.Tensor:
    """A cache of which an entry lies beside another cache's."""
    return torch.randn(shape[0], 2, *shape[1:], device=device)[:, 1]


@WINDOWS
@torch.no_grad()
def test_pools_and_tails_equal_the_indexers(window: int, call: Call, device: str) -> None:
    indexer = local_indexer()[0].to(device)
    for history in ([2, 29], [3, 30], [31, 6], [0, 12]):
        paging, x = padded_paging(history, window, device), torch.randn(3 * window, HIDDEN, device=device)
        x[2 * window :] = float('nan')
        pools, tail = packed(9, BLOCK // POOL, DIM, device=device), packed(3, ROWS, 2, DIM, device=device)
        expected = pools.clone(), tail.clone()
        keys, logits = indexer.k_norm(indexer.wk(x)), F.linear(x, indexer.index_kpool_compress_gate)
        reference.write_pools(keys, logits, indexer.index_kpool_compress_ape, *expected, paging)
        call('triton_indexer.write_pools', keys, logits, indexer.index_kpool_compress_ape, pools, tail, paging)
        for ours, theirs in zip((pools, tail), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@WINDOWS
@torch.no_grad()
def test_what_is_selected_is_what_the_indexer_selects(window: int, call: Call, device: str) -> None:
    torch.manual_seed(0)
    pools = packed(9, BLOCK // POOL, DIM, device=device)
    for history in ([2, 29], [39, 12], [0, 3]):
        paging = padded_paging(history, min(window, 40 - max(history)), device)
        (group,) = paging.groups
        shape = group.position.shape
        queries = torch.randn(*shape, HEADS, DIM, device=device)
        weights = torch.randn(*shape, HEADS, device=device) * HEADS**-0.5
        scores = call('triton_indexer.score', queries, weights, pools, group.blocks, group.position, POOL)
        expected = reference.score(queries, weights, pools[group.blocks].flatten(1, 2), group.position, POOL)
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
        operands = queries, weights, pools, group, POOL, TOP_POOLS
        selected = call('triton_indexer.select_tokens', *operands)
        assert torch.equal(selected.sort().values, reference.select_tokens(*operands).sort().values)


@pytest.mark.parametrize('capability', [80, 90, 100])
@pytest.mark.parametrize('kernel', ['write_pools', 'score', 'expand'])
def test_it_compiles(kernel: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paging = padded_paging([2, 29], 4, 'cpu')
    (group,) = paging.groups
    keys, ape = torch.empty(12, 128).bfloat16(), torch.empty(POOL, 128).bfloat16()
    pools, tail = torch.empty(9, 16, 128).bfloat16(), torch.empty(3, ROWS, 2, 128).bfloat16()
    queries, weights = torch.empty(3, 4, 32, 128).bfloat16(), torch.empty(3, 4, 32)
    operands = {
        'write_pools': (keys, keys, ape, pools, tail, paging),
        'score': (queries, weights, pools, group.blocks, group.position, POOL),
        'expand': (torch.zeros(3, 4, 512), torch.zeros(3, 4, 512).long(), group.position, POOL),
    }
    launch, jitted = getattr(triton_indexer, kernel), getattr(triton_indexer, f'_{kernel}_kernel')
    assert stack_bytes(compile_launch(monkeypatch, jitted, capability, launch, *operands[kernel])) == 0
