"""State pools as LMDeploy packs them: all tensors of a slot in one row of bytes, so slot strides are the row's."""

from __future__ import annotations

import math

import torch

from replayssm.layout import LayerState, StateLayout


def packed_layers(layout: StateLayout, slots: int, device: str, slot_bytes: int = 0) -> list[LayerState]:
    """Zeroed states of every layer of `layout`; `slot_bytes` widens a slot's row."""
    tensors = layout.tensors()
    row_bytes = max(slot_bytes, sum(tensor.nbytes for tensor in tensors))
    pool = torch.zeros(slots, row_bytes, dtype=torch.uint8, device=device)
    views, start = [], 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        views.append(pool[:, start : start + size].view(tensor.dtype).view(slots, *tensor.shape))
        start += tensor.nbytes
    return [layout.layer(views, i) for i in range(layout.num_layers)]
