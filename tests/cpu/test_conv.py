"""The causal convolution against its definition, token by token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from replayssm.cpu.conv import CpuCausalConv1dImpl

CHANNELS, WIDTH = 6, 4


def _definition(
    history: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`[T, C]` of `x` `[T, C]` after `history` `[W - 1, C]`."""
    rows = torch.cat((history, x))
    outs = [(rows[t : t + WIDTH] * weight.T).sum(0) + (0 if bias is None else bias) for t in range(x.size(0))]
    return F.silu(torch.stack(outs))


def _meta(lens: list[int], slots: list[int], starts: list[bool], read: torch.Tensor | None, write: torch.Tensor | None):
    ends = torch.tensor(lens).cumsum(0)
    return SimpleNamespace(
        is_decoding=False,
        conv_idx=(ends[:, None] + torch.arange(-WIDTH, 0)).clamp_min(0),
        seq_idx=torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))[None],
        state_ids=torch.tensor(slots),
        is_init=torch.tensor(starts),
        spec_conv_offsets=None if read is None else (read, write),
    )


@pytest.fixture(params=[False, True], ids=['no-bias', 'bias'])
def parameters(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(0)
    return torch.randn(CHANNELS, 1, WIDTH), torch.randn(CHANNELS) if request.param else None


@pytest.mark.parametrize('num_drafts', [0, 3], ids=['register', 'ring'])
def test_prefill(parameters: tuple[torch.Tensor, torch.Tensor | None], num_drafts: int) -> None:
    weight, bias = parameters
    lens, slots, starts, done = [5, 17, 4], [3, 1, 2], [True, False, True], [0, 9, 0]
    x = torch.randn(1, sum(lens), CHANNELS)
    history = torch.randn(3, WIDTH - 1, CHANNELS)
    pool = torch.full((5, CHANNELS, WIDTH + num_drafts), torch.nan)
    read = write = None
    if num_drafts:
        position = torch.tensor(done)[:, None]
        read = (position + torch.arange(1 - WIDTH, 0)) % (WIDTH + num_drafts)
        write = (position + torch.tensor(lens)[:, None] + torch.arange(-WIDTH, 0)) % (WIDTH + num_drafts)
        pool[1, :, read[1]] = history[1].T
    else:
        pool[1, :, 1:] = history[1].T
    history[[0, 2]] = 0
    out = CpuCausalConv1dImpl().forward(x, weight, bias, pool, _meta(lens, slots, starts, read, write), 'silu')
    for row, (part, slot) in enumerate(zip(x[0].split(lens), slots, strict=True)):
        torch.testing.assert_close(out[0].split(lens)[row], _definition(history[row], part, weight[:, 0], bias))
        stored = pool[slot] if write is None else pool[slot][:, write[row]]
        assert torch.equal(stored, part[-WIDTH:].T)
    assert pool[[0, 4]].isnan().all()


@pytest.mark.parametrize('num_drafts', [0, 3], ids=['register', 'ring'])
def test_decode_continues(parameters: tuple[torch.Tensor, torch.Tensor | None], num_drafts: int) -> None:
    """Steps of one token, or of one and three drafts that are all kept, with a padding row in the batch."""
    weight, bias = parameters
    steps, size = 6, 1 + num_drafts
    x = torch.randn(3, steps * size, CHANNELS)
    history = torch.randn(3, WIDTH - 1, CHANNELS)
    slots, done = torch.tensor([4, -1, 1], dtype=torch.int32), torch.tensor([5, 0, 8])
    pool = torch.full((6, CHANNELS, WIDTH + num_drafts), torch.nan)
    for row in (0, 2):
        if num_drafts:
            pool[slots[row], :, (done[row] + torch.arange(1 - WIDTH, 0)) % (WIDTH + num_drafts)] = history[row].T
        else:
            pool[slots[row], :, 1:] = history[row].T
    pool[0] = 0
    outs = []
    for step in range(steps):
        chunk = x[:, step * size : (step + 1) * size]
        meta = SimpleNamespace(
            is_decoding=True,
            conv_state_indices=slots,
            cache_seqlens=done + step * size if num_drafts else None,
        )
        out = CpuCausalConv1dImpl().forward(chunk.flatten(0, 1)[None], weight, bias, pool, meta, 'silu')
        outs.append(out[0].unflatten(0, (3, size)))
    for row in (0, 2):
        expected = _definition(history[row], x[row], weight[:, 0], bias)
        torch.testing.assert_close(torch.cat(outs, dim=1)[row], expected)
    assert torch.equal(pool[0], torch.zeros_like(pool[0]))
    assert pool[[2, 3, 5]].isnan().all()


def test_rejected_drafts_are_forgotten(parameters: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    weight, bias = parameters
    num_drafts, kept = 3, 2
    x = torch.randn(1, 4, CHANNELS)
    retry = torch.randn(1, 4, CHANNELS)
    pool = torch.zeros(2, CHANNELS, WIDTH + num_drafts)
    op = CpuCausalConv1dImpl()
    meta = SimpleNamespace(is_decoding=True, conv_state_indices=torch.tensor([1]), cache_seqlens=torch.tensor([0]))
    op.forward(x, weight, bias, pool, meta, 'silu')
    meta.cache_seqlens = torch.tensor([kept])
    out = op.forward(retry, weight, bias, pool, meta, 'silu')
    sequence = torch.cat((x[0, :kept], retry[0]))
    expected = _definition(torch.zeros(WIDTH - 1, CHANNELS), sequence, weight[:, 0], bias)
    torch.testing.assert_close(out[0], expected[kept:])


def test_unknown_activation_raises(parameters: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    weight, bias = parameters
    meta = SimpleNamespace(is_decoding=True, conv_state_indices=torch.tensor([0]), cache_seqlens=None)
    with pytest.raises(NotImplementedError, match='gelu'):
        CpuCausalConv1dImpl().forward(
            torch.zeros(1, 1, CHANNELS), weight, bias, torch.zeros(1, CHANNELS, WIDTH), meta, 'gelu'
        )
