"""A window of drafts as single tokens: what each of them sees."""

from __future__ import annotations

import pytest
import torch

from replayssm.patch.window_attention import window_seqlens
from replayssm.patching import Patches


def test_every_token_of_a_window_sees_itself_and_what_is_before_it() -> None:
    assert window_seqlens(torch.tensor([10, 4]), 4).tolist() == [7, 8, 9, 10, 1, 2, 3, 4]
    assert window_seqlens(torch.tensor([10, 4]), 1).tolist() == [10, 4]


def test_padding_rows_see_nothing() -> None:
    assert (window_seqlens(torch.tensor([0]), 4) <= 0).all()


@pytest.mark.cuda
@pytest.mark.parametrize('window', [1, 2, 4, 8])
def test_paged_window_equals_dense_causal_attention(window: int) -> None:
    from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionImpl, TritonAttentionMetadata

    from replayssm.patch import window_attention

    torch.manual_seed(0)
    heads, kv_heads, size, block = 8, 2, 64, 16
    lengths = torch.tensor([window, 37, 64, 129])
    pages = -(-int(lengths.max()) // block)
    table = torch.randperm(len(lengths) * pages).view(len(lengths), pages).int().cuda()
    cache = torch.randn(2, len(lengths) * pages, block, kv_heads, size, device='cuda', dtype=torch.bfloat16)
    query = torch.randn(len(lengths) * window, heads, size, device='cuda', dtype=torch.bfloat16)
    lens = torch.full((len(lengths),), window, device='cuda')
    metadata = TritonAttentionMetadata(
        is_decoding=True, block_offsets=table, q_seqlens=lens, kv_seqlens=lengths.cuda(), max_q_seqlen=window
    )
    patches = Patches()
    window_attention.install(patches)
    try:
        attention = TritonAttentionImpl(heads, size, num_kv_heads=kv_heads)
        out = attention.forward(query, None, None, cache[0], cache[1], metadata)
    finally:
        patches.undo()
    for i, length in enumerate(lengths.tolist()):
        k, v = (c[table[i].long()].flatten(0, 1)[:length].float().transpose(0, 1) for c in cache)
        q = query.view(len(lengths), window, heads, size)[i].float().transpose(0, 1)
        mask = torch.ones(window, length, device='cuda', dtype=torch.bool).tril(length - window)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        got = out.view(len(lengths), window, heads, size)[i].float().transpose(0, 1)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
