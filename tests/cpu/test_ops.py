"""Attention, rotary embedding, norms and experts against their definitions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec
from lmdeploy.pytorch.backends.flash_attention import FlashAttentionBuildSpec

from replayssm.cpu.attention import CpuFlashAttentionImpl, CpuPagedAttentionImpl, build_metadata
from replayssm.cpu.moe import CpuFusedMoEImpl
from replayssm.cpu.norm import CpuRMSNormGated, CpuRMSNormImpl
from replayssm.cpu.rotary import CpuApplyRotaryEmbImpl

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, BLOCK = 4, 2, 24, 16, 16


def _paged_spec(**options: object) -> PagedAttentionBuildSpec:
    fields = {
        'num_heads': HEADS,
        'head_dim': KEY_DIM,
        'scale': None,
        'num_kv_heads': KV_HEADS,
        'v_head_dim': VALUE_DIM,
        'alibi': False,
        'sliding_window': None,
        'logit_softcapping': 0.0,
        'causal': True,
        'use_flash_mla': False,
        'mla_index_topk': None,
        'learnable_sink': False,
        'block_sparse_size': 1,
    }
    return PagedAttentionBuildSpec(**(fields | options))


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`[Q, H, V]` of the last Q queries over keys `[M, HKV, K]`, by definition in float64."""
    ratio = q.size(1) // k.size(1)
    k, v = k.double().repeat_interleave(ratio, 1), v.double().repeat_interleave(ratio, 1)
    scores = torch.einsum('qhd,mhd->hqm', q.double(), k) * q.size(-1) ** -0.5
    position = torch.arange(k.size(0) - q.size(0), k.size(0))
    scores = scores.masked_fill(torch.arange(k.size(0)) > position[:, None], float('-inf'))
    return torch.einsum('hqm,mhd->qhd', scores.softmax(-1), v)


@pytest.mark.parametrize(
    ('query_lens', 'context_lens'),
    [
        pytest.param([1, 1, 1], [1, 33, 16], id='decode'),
        pytest.param([4, 4], [21, 4], id='verify'),
        pytest.param([5, 17, 1], [5, 17, 1], id='prefill'),
        pytest.param([5, 17, 2], [25, 17, 40], id='chunked-prefill'),
    ],
)
def test_paged_attention(query_lens: list[int], context_lens: list[int]) -> None:
    torch.manual_seed(0)
    num_tokens, num_blocks = sum(query_lens), 16
    q = torch.randn(num_tokens, HEADS, KEY_DIM)
    keys = [torch.randn(n, KV_HEADS, KEY_DIM) for n in context_lens]
    values = [torch.randn(n, KV_HEADS, VALUE_DIM) for n in context_lens]
    # Rows that nobody has written yet are poison, also in the blocks of these sequences.
    k_cache = torch.full((num_blocks, BLOCK, KV_HEADS, KEY_DIM), torch.nan)
    v_cache = torch.full((num_blocks, BLOCK, KV_HEADS, VALUE_DIM), torch.nan)
    blocks = torch.randperm(num_blocks)[: 3 * len(query_lens)].view(len(query_lens), 3)
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        for position in range(context_len - query_len):
            k_cache[blocks[row, position // BLOCK], position % BLOCK] = keys[row][position]
            v_cache[blocks[row, position // BLOCK], position % BLOCK] = values[row][position]
    lens = torch.tensor(query_lens)
    context = SimpleNamespace(
        q_seqlens=lens,
        kv_seqlens=torch.tensor(context_lens),
        q_start_loc=lens.cumsum(0) - lens,
        block_offsets=blocks,
        is_decoding=False,
        kv_quant_policy=0,
        kv_caches=[[k_cache, v_cache]],
    )
    new_keys = torch.cat([k[-n:] for k, n in zip(keys, query_lens, strict=True)])
    new_values = torch.cat([v[-n:] for v, n in zip(values, query_lens, strict=True)])
    out = CpuPagedAttentionImpl(_paged_spec()).forward(
        q, new_keys, new_values, k_cache, v_cache, attn_metadata=build_metadata(context)
    )
    expected = [_attention(*part) for part in zip(q.split(query_lens), keys, values, strict=True)]
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    'option',
    [{'alibi': True}, {'sliding_window': 8}, {'logit_softcapping': 30.0}, {'learnable_sink': True}, {'causal': False}],
    ids=lambda option: next(iter(option)),
)
def test_paged_attention_refuses(option: dict[str, object]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        CpuPagedAttentionImpl(_paged_spec(**option))


@pytest.mark.parametrize('causal', [True, False], ids=['causal', 'full'])
def test_packed_attention(causal: bool) -> None:
    torch.manual_seed(0)
    lens = torch.tensor([3, 9])
    q, k, v = torch.randn(12, HEADS, KEY_DIM), torch.randn(12, KV_HEADS, KEY_DIM), torch.randn(12, KV_HEADS, VALUE_DIM)
    spec = FlashAttentionBuildSpec(HEADS, KEY_DIM, None, KV_HEADS, VALUE_DIM, causal, None, 0.0)
    starts = lens.cumsum(0) - lens
    out = CpuFlashAttentionImpl(spec).forward(q, k, v, starts, lens, starts, lens)
    assert out.shape == (12, HEADS, VALUE_DIM)
    for q_part, k_part, v_part, part in zip(*(x.split(lens.tolist()) for x in (q, k, v, out)), strict=True):
        expected = _attention(q_part, k_part, v_part)
        if not causal:
            # The last query of a causal sequence sees everything, whatever its place.
            expected = torch.cat([_attention(query[None], k_part, v_part) for query in q_part])
        torch.testing.assert_close(part.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('rope_dim', [8, KEY_DIM], ids=['partial', 'whole'])
@pytest.mark.parametrize('inplace', [True, False], ids=['inplace', 'copy'])
def test_rotary(rope_dim: int, inplace: bool) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(5, HEADS, KEY_DIM), torch.randn(5, KV_HEADS, KEY_DIM)
    angle = torch.rand(5, rope_dim // 2) * 6
    cos, sin = (torch.cat((x, x), dim=-1) for x in (angle.cos(), angle.sin()))
    half = rope_dim // 2
    originals = q.clone(), k.clone()
    outs = CpuApplyRotaryEmbImpl().forward(q, k, cos, sin, inplace=inplace)
    for original, given, out in zip(originals, (q, k), outs, strict=True):
        pair = torch.complex(original[..., :half], original[..., half:rope_dim])
        turned = pair * torch.polar(torch.ones_like(angle), angle)[:, None]
        expected = torch.cat((turned.real, turned.imag, original[..., rope_dim:]), dim=-1)
        torch.testing.assert_close(out, expected)
        assert torch.equal(given, out if inplace else original)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_with_residual(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 8).to(dtype), torch.randn(3, 8).to(dtype), torch.randn(8).to(dtype)
    out, total = CpuRMSNormImpl(8, 1e-6).forward(x, weight, residual)
    expected = x + residual
    assert torch.equal(total, expected)
    norm = expected.double() * (expected.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(out, (norm * weight.double()).to(dtype))
    torch.testing.assert_close(CpuRMSNormImpl(8, 1e-6).forward(expected, weight), out)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(('activation', 'gate'), [('silu', F.silu), ('swish', F.silu), ('sigmoid', torch.sigmoid)])
def test_gated_rms_norm(activation: str, gate: object, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = CpuRMSNormGated(8, eps=1e-5, activation=activation, dtype=dtype)
    norm.weight.data = torch.randn(8).to(dtype)
    x, z = torch.randn(3, 8).to(dtype), torch.randn(3, 8).to(dtype)
    y = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x, z), (y * gate(z.double())).to(dtype))


def test_gated_rms_norm_refuses_other_gates() -> None:
    with pytest.raises(ValueError, match='relu'):
        CpuRMSNormGated(8, activation='relu')


@pytest.mark.parametrize('renormalize', [True, False])
def test_experts(renormalize: bool) -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(7, 6), torch.randn(4, 10, 6), torch.randn(4, 6, 5)
    weights, ids = torch.rand(7, 4).topk(2)
    out = CpuFusedMoEImpl(renormalize).forward(x, weights, ids, gate_up, down)
    scale = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    for token in range(7):
        expected = torch.zeros(6)
        for rank in range(2):
            gate, up = (gate_up[ids[token, rank]] @ x[token]).chunk(2)
            expected += scale[token, rank] * (down[ids[token, rank]] @ (F.silu(gate) * up))
        torch.testing.assert_close(out[token], expected)
