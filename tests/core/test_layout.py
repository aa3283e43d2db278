"""Shapes and bytes of a state slot, against the published figures of the two mission models."""

from __future__ import annotations

import pytest
import torch

from replayssm.config import ReplayConfig
from replayssm.layout import StateLayout, pool_tail, slot_bytes

MIB = 2**20


def qwen(num_drafts: int, config: ReplayConfig) -> StateLayout:
    """Qwen3.5-35B-A3B on one GPU."""
    conv = (30, 8192, 4 + num_drafts)
    return StateLayout(30, 16, 32, 128, 128, conv, torch.bfloat16, torch.bfloat16, num_drafts, config)


def kind_bytes(layout: StateLayout, kind: str) -> int:
    return slot_bytes([tensor for tensor in layout.tensors() if tensor.kind == kind])


def test_checkpoint_is_one_state_whatever_the_drafts() -> None:
    assert kind_bytes(qwen(3, ReplayConfig()), 'checkpoint') == 60 * MIB
    assert kind_bytes(qwen(3, ReplayConfig(checkpoint_dtype='bfloat16')), 'checkpoint') == 30 * MIB


@pytest.mark.parametrize(('drafts', 'state_mib', 'conv_mib'), [(0, 60, 1.875), (3, 240, 3.28125)])
def test_stock_keeps_a_state_for_every_draft(drafts: int, state_mib: float, conv_mib: float) -> None:
    conv, state = qwen(drafts, ReplayConfig()).stock_tensors()
    assert state.nbytes == state_mib * MIB
    assert conv.nbytes == conv_mib * MIB


def test_ring_of_twenty_rows_in_bfloat16() -> None:
    layout = qwen(3, ReplayConfig(buffer_len=16, record_dtype='bfloat16'))
    assert layout.ring_rows == 20
    assert kind_bytes(layout, 'ring') / MIB == pytest.approx(7.1, abs=0.1)


def test_slot_bytes_are_what_lmdeploy_allocates() -> None:
    from lmdeploy.pytorch.engine.cache_engine.schema import CacheDesc

    layout = StateLayout(3, 2, 6, 16, 48, (3, 352, 7), torch.float32, torch.float32, 3, ReplayConfig())
    for tensor in layout.tensors() + layout.stock_tensors():
        assert tensor.nbytes == CacheDesc(list(tensor.shape), tensor.dtype).aligned_size


def test_layer_views_share_the_pool() -> None:
    layout = StateLayout(3, 2, 6, 16, 48, (3, 352, 7), torch.float32, torch.float32, 3, ReplayConfig(8))
    pool = [torch.zeros(5, *t.shape, dtype=t.dtype) for t in layout.tensors()]
    state = layout.layer(pool, 1)
    state.delta[2, 5, 3] = 1
    assert pool[4][2, 1, 5, 3].eq(1).all()
    assert pool[4].sum() == 48
    assert [tuple(t.shape[1:]) for t in state] == [(6, 48, 16), (2, 12, 16), (2, 12), (6, 12, 48), (6, 12)]


def test_a_window_that_exceeds_the_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match=r'buffer_len: expected at least 4 .*got 3'):
        qwen(3, ReplayConfig(buffer_len=3))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'buffer_len': 0}, r'buffer_len: expected 1\.\.32, got 0'),
        ({'buffer_len': 33}, r'buffer_len: expected 1\.\.32, got 33'),
        ({'buffer_len': 4.0}, 'buffer_len: expected an integer, got 4.0'),
        ({'checkpoint_dtype': 'float16'}, "checkpoint_dtype: expected one of float32, bfloat16, got 'float16'"),
        ({'record_dtype': 'fp8'}, "record_dtype: expected one of float32, bfloat16, got 'fp8'"),
    ],
)
def test_options_out_of_range_name_themselves(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayConfig(**options)  # type: ignore[arg-type]


def test_vector_gates_are_kept_as_logits_of_the_activation_dtype() -> None:
    tail = pool_tail(layers=2, pool=4, num_drafts=3, dim=8, dtype=torch.bfloat16)
    layout = StateLayout(
        3, 2, 2, 16, 48, (3, 160, 7), torch.bfloat16, torch.bfloat16, 3, ReplayConfig(8), 'vector', (tail,)
    )
    pool = [torch.zeros(5, *t.shape, dtype=t.dtype) for t in layout.tensors()]
    state = layout.layer(pool, 1)
    assert (tuple(state.gate.shape), state.gate.dtype) == ((5, 2, 12, 16), torch.bfloat16)
    assert [tensor.kind for tensor in layout.tensors()[-2:]] == ['index', 'cursor']
    assert layout.stock_tensors()[-1].shape == tail.shape == (2, 7, 2, 8)
