"""Work of which the temporaries would not fit, in pieces; the number of pieces depends on shapes alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

WORK_BYTES = 256 * 1024**2
"""What the temporaries of one piece may occupy; a CUDA graph of a wide page table is captured while serving."""


def pieces(count: int, bytes_each: int) -> Iterator[slice]:
    """Cover `count` items by one slice or more, of which each needs at most `WORK_BYTES` or has one item."""
    step = max(1, WORK_BYTES // bytes_each)
    for start in range(0, max(count, 1), step):
        yield slice(start, min(start + step, count))


def float_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N] in float32, whatever the dtype of the operands."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
