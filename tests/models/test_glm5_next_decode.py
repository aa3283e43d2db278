"""Decode steps of GLM-5.3-Flash as a CUDA graph needs them: no value is read back, and padding harms nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from replayssm.models.glm5_next import pieces
from replayssm.models.glm5_next.attention import attend_dense, attend_gathered
from replayssm.models.glm5_next.graphs import DecodeGraphs, table_width
from replayssm.models.glm5_next.paging import build_paging

from .small_indexer import BLOCK, DRAFTS, HIDDEN, POOL, RANK, ROWS, SCALE, Caches, decode, local_indexer, step


@pytest.mark.parametrize('window', [1, 1 + DRAFTS])
@torch.no_grad()
def test_padding_changes_nothing_of_real_sequences(window: int) -> None:
    indexer, _ = local_indexer()
    history = [2, 29]
    blocks = torch.tensor([[0, 2, 7, 1, 3], [6, 4, 8, 5, 3]])
    x, q_latent = torch.randn(2 * window, HIDDEN), torch.randn(2 * window, RANK)
    plain, padded = Caches(), Caches()
    slots = torch.tensor([1, 2])
    expected = decode(
        indexer, plain, build_paging(step(history, window, True, blocks), slots, 2 * window, BLOCK), x, q_latent
    )

    metadata = step([*history, 0, 0], window, True, F.pad(blocks, (0, 3, 0, 2)))
    paging = build_paging(metadata, F.pad(slots, (0, 2), value=-1), 4 * window, BLOCK)
    behind = torch.full((2 * window, HIDDEN), float('nan'))
    out = decode(indexer, padded, paging, torch.cat([x, behind]), torch.cat([q_latent, behind[:, :RANK]]))
    torch.testing.assert_close(out[: 2 * window], expected, rtol=1e-5, atol=1e-6)
    for ours, theirs, before in zip(padded.tensors(), plain.tensors(), Caches().tensors(), strict=True):
        # Products of four rows need not round as those of two; where the real sequences write nothing, nobody does.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        untouched = theirs == before
        assert torch.equal(ours[untouched], before[untouched])


@torch.no_grad()
def test_pools_and_tails_are_those_of_completed_pools_and_newest_tokens() -> None:
    """Against the plain formulation: write only where a pool ends, and only tokens that no later one overwrites."""
    indexer, _ = local_indexer()
    for length, is_decoding in ((1, True), (4, True), (3, False), (23, False)):
        caches, expected = Caches(), Caches()
        blocks = torch.tensor([[0, 2, 7, 1, 3, 6, 4]])
        paging = build_paging(step([9], length, is_decoding, blocks), torch.tensor([1]), length, BLOCK)
        x = torch.randn(length, HIDDEN)
        indexer.write(x, caches.pools, caches.tail, paging)
        keys = indexer.k_norm(indexer.wk(x))
        entries = torch.stack([keys, F.linear(x, indexer.index_kpool_compress_gate)], 1)
        by_position = {9 + i: entry for i, entry in enumerate(entries)}
        by_position |= {p: expected.tail[1, p % ROWS].clone() for p in range(9 - ROWS, 9)}
        for position in range(9, 9 + length):
            expected.tail[1, position % ROWS] = by_position[position]
            if position % POOL == POOL - 1:
                members = torch.stack([by_position[p] for p in range(position - POOL + 1, position + 1)])
                weights = (members[:, 1] + indexer.index_kpool_compress_ape).softmax(0)
                row = (blocks[0, position // BLOCK], position % BLOCK // POOL)
                expected.pools[row] = (weights * members[:, 0]).sum(0)
        assert torch.equal(caches.tail, expected.tail)
        torch.testing.assert_close(caches.pools, expected.pools, rtol=1e-6, atol=1e-6)
        unchanged = (expected.pools == Caches().pools).all(-1)
        assert torch.equal(caches.pools[unchanged], Caches().pools[unchanged])


@pytest.mark.parametrize('budget', [pieces.WORK_BYTES, 1], ids=['whole', 'one-by-one'])
@torch.no_grad()
def test_gathered_attention_equals_a_mask_over_all_cached_tokens(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    indexer, _ = local_indexer()
    caches = Caches()
    caches.latents[4] = float('nan')
    blocks = torch.tensor([[0, 2, 7, 1, 3, 6, 4], [0, 2, 7, 1, 3, 6, 4]])
    (group,) = build_paging(step([37, 5], 4, True, blocks), torch.tensor([1, 2]), 8, BLOCK).groups
    x, q_latent, query = torch.randn(2, 4, HIDDEN), torch.randn(2, 4, RANK), torch.randn(2, 4, 3, RANK)
    whole = indexer.select(q_latent, x, caches.pools, group)
    dense = attend_dense(query, whole, caches.latents, group, SCALE)
    monkeypatch.setattr(pieces, 'WORK_BYTES', budget)
    assert torch.equal(indexer.select(q_latent, x, caches.pools, group).sort().values, whole.sort().values)
    for attend in (attend_dense, attend_gathered):
        torch.testing.assert_close(attend(query, whole, caches.latents, group, SCALE), dense, rtol=1e-5, atol=1e-6)
    for i, j in ((0, 0), (1, 3)):
        tokens = whole[i, j][whole[i, j] >= 0].long()
        cached = caches.latents[blocks[0, tokens // BLOCK], tokens % BLOCK]
        weights = (query[i, j] @ cached.mT * SCALE).softmax(-1)
        torch.testing.assert_close(dense[i, j], weights @ cached, rtol=1e-5, atol=1e-6)


def on_meta(value: Any) -> Any:
    return value.to('meta') if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize('window', [1, 1 + DRAFTS])
def test_no_value_is_read_back_from_the_device(window: int) -> None:
    """On the meta device every tensor has a shape and no values, so `item`, `tolist` and data-dependent shapes fail."""
    indexer = local_indexer()[0].to('meta')
    metadata = step([2, 29], window, True, torch.tensor([[0, 2, 7, 1, 3], [6, 4, 8, 5, 3]]))
    metadata = SimpleNamespace(**{name: on_meta(value) for name, value in vars(metadata).items()})
    caches = Caches()
    caches.latents, caches.pools, caches.tail = (on_meta(cache) for cache in caches.tensors())
    with torch.device('meta'):
        slots, tokens = torch.empty(2, dtype=torch.int64), 2 * window
        paging = build_paging(metadata, slots, tokens, BLOCK)
        out = decode(indexer, caches, paging, torch.empty(tokens, HIDDEN), torch.empty(tokens, RANK))
    assert out.shape == (2 * window, 2, RANK)


def test_graphs_come_in_widths_of_their_page_table() -> None:
    assert [table_width(pages, 64) for pages in (1, 64, 65, 256, 257, 16384)] == [64, 64, 256, 256, 1024, 16384]
    graphs = DecodeGraphs()
    keys = {graphs.get_cudagraph_extra_key(p, skip_topk=s, state_ids=None) for p in (64, 256) for s in (False, True)}
    assert len(keys) == 4
