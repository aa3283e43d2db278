"""The convolution state that a prefill saves, against a loop over the tokens of each sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.cuda.causal_conv1d import CausalConv1dTilelangImpl
from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMeta
from lmdeploy.pytorch.model_inputs import BuildModelContext, get_step_ctx_manager, set_step_ctx_manager

from replayssm.cpu.conv import CpuCausalConv1dImpl
from replayssm.patch import conv_tail
from tests.patch.scheduling import STOCK_AND_FIXED, installed

CHANNELS = 5
WIDTH = 4
NUM_SLOTS = 12
POISON = 1e3
"""What a slot holds before its sequence starts: nothing of it may survive."""

LENGTHS = {
    'one-token': ((0, 1),),
    'two-tokens': ((0, 2),),
    'three-tokens': ((0, 3),),
    'kernel-width': ((0, 4),),
    'behind-a-neighbour': ((0, 9), (0, 1), (0, 2), (0, 6)),
    'last-chunks': ((64, 1), (64, 2), (128, 3), (64, 5)),
    'after-a-short-history': ((1, 1), (2, 1), (1, 2), (3, 2)),
    'all-kinds': ((0, 1), (64, 2), (0, 7), (2, 1), (64, 1), (0, 3), (5, 30)),
}
"""Per case the sequences of a batch, each (tokens before the chunk, tokens of the chunk)."""

SHORT_CASES = set(LENGTHS) - {'kernel-width'}


class TorchTilelangImpl(CausalConv1dTilelangImpl):
    """LMDeploy's CUDA convolution with its one device function computed by torch."""

    def __init__(self) -> None:
        self.causal_conv1d_fn = _conv1d_per_sequence


def _conv1d_per_sequence(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, *, seq_idx: torch.Tensor, initial_states: torch.Tensor, **_: Any
) -> torch.Tensor:
    outputs = []
    for i, initial in enumerate(initial_states):
        window = torch.cat((initial, x[0][:, seq_idx[0] == i]), dim=-1)
        outputs.append(F.conv1d(window[None], weight[:, None], groups=CHANNELS)[0])
    return torch.cat(outputs, dim=-1)[None]


@pytest.fixture(autouse=True)
def _step_context() -> Any:
    """GatedDeltaMeta asks the context of the model for the number of drafts."""
    before = get_step_ctx_manager()
    yield
    set_step_ctx_manager(before)


def make_meta(cases: tuple[tuple[int, int], ...], num_drafts: int) -> GatedDeltaMeta:
    set_step_ctx_manager(SimpleNamespace(build_ctx=BuildModelContext(num_spec_tokens=num_drafts)))
    before, lengths = torch.tensor(cases).unbind(1)
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    attn_metadata = SimpleNamespace(
        is_decoding=False, cu_seqlens_q=cu_seqlens, q_seqlens=lengths, kv_seqlens=before + lengths
    )
    slots = torch.arange(len(cases)) + 2
    return GatedDeltaMeta(int(lengths.sum()), WIDTH, slots, attn_metadata)


def run_prefill(impl: Any, cases: tuple[tuple[int, int], ...], num_drafts: int) -> tuple[torch.Tensor, ...]:
    """Return the output, the state after it, and both as a loop over the tokens gives them."""
    torch.manual_seed(0)
    size = WIDTH + num_drafts
    state = torch.full((NUM_SLOTS, CHANNELS, size), POISON)
    weight = torch.randn(CHANNELS, WIDTH)
    inputs = [torch.randn(CHANNELS, before + length) for before, length in cases]
    expected_outputs = []
    for slot, (series, (before, _)) in enumerate(zip(inputs, cases, strict=True), start=2):
        padded = F.pad(series, (WIDTH, 0))
        expected_outputs.append(F.conv1d(padded[None, :, 1:], weight[:, None], groups=CHANNELS)[0, :, before:])
        if before:
            _save(state[slot], padded, before, num_drafts)
    expected_state = state.clone()
    for slot, (series, (before, length)) in enumerate(zip(inputs, cases, strict=True), start=2):
        _save(expected_state[slot], F.pad(series, (WIDTH, 0)), before + length, num_drafts)
    x = torch.cat([series[:, before:] for series, (before, _) in zip(inputs, cases, strict=True)], dim=1)
    output = impl.forward(x.T[None], weight, None, state, make_meta(cases, num_drafts), None)
    return output[0].T, state, torch.cat(expected_outputs, dim=1), expected_state


def _save(slot: torch.Tensor, padded: torch.Tensor, end: int, num_drafts: int) -> None:
    """Write the last WIDTH inputs before position `end` into a slot; `padded` has WIDTH zeros in front."""
    for position in range(end - WIDTH, end):
        column = position % slot.size(-1) if num_drafts else position - end + WIDTH
        slot[:, column] = padded[:, position + WIDTH]


@STOCK_AND_FIXED
@pytest.mark.parametrize('num_drafts', [0, 3], ids=['plain', 'mtp3'])
@pytest.mark.parametrize('case', LENGTHS)
@pytest.mark.parametrize('impl', [TorchTilelangImpl, CpuCausalConv1dImpl], ids=['cuda', 'cpu'])
def test_prefill_saves_the_last_inputs(impl: type[Any], case: str, num_drafts: int, fixed: bool) -> None:
    with installed(conv_tail, when=fixed):
        output, state, expected_output, expected_state = run_prefill(impl(), LENGTHS[case], num_drafts)
    torch.testing.assert_close(output, expected_output)
    if not fixed and case in SHORT_CASES:
        assert not torch.equal(state, expected_state)
        return
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


@pytest.mark.parametrize('num_drafts', [0, 3], ids=['plain', 'mtp3'])
@pytest.mark.parametrize('impl', [TorchTilelangImpl, CpuCausalConv1dImpl], ids=['cuda', 'cpu'])
def test_long_chunks_are_saved_bit_for_bit_as_before(impl: type[Any], num_drafts: int) -> None:
    cases = ((0, 4), (64, 17), (3, 9))
    stock = run_prefill(impl(), cases, num_drafts)
    with installed(conv_tail):
        fixed = run_prefill(impl(), cases, num_drafts)
    for before, after in zip(stock, fixed, strict=True):
        assert torch.equal(before, after)


def test_the_index_never_leaves_its_tensors() -> None:
    """A sequence without tokens, as padding may bring, reads something valid and nothing more."""
    index = conv_tail.tail_index(torch.tensor([0, 0, 1, 1, 5], dtype=torch.int32), WIDTH)
    assert index.token.min() >= 0 and index.token.max() < 5
    assert index.column.min() >= 0 and index.column.max() < WIDTH - 1


@pytest.mark.parametrize('case', LENGTHS)
def test_no_value_is_read_back_from_the_device(case: str) -> None:
    """On the meta device every tensor has a shape and no values, so `item`, `tolist` and data-dependent shapes fail."""
    lengths = [length for _, length in LENGTHS[case]]
    with torch.device('meta'):
        x = torch.empty(1, sum(lengths), CHANNELS)
        initial = torch.empty(len(lengths), CHANNELS, WIDTH - 1)
        index = conv_tail.tail_index(torch.empty(len(lengths) + 1, dtype=torch.int32), WIDTH)
        assert conv_tail.conv_tail(x, initial, index).shape == (len(lengths), CHANNELS, WIDTH)
