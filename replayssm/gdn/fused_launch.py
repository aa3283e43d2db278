"""What launches of the fused kernels, GDN's and KDA's, have in common: the GPU, tiles and their TMA descriptors."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from replayssm.gdn.fused_tiles import row_layout
from replayssm.gdn.fused_window import BK
from replayssm.gdn.operands import Dims

SCRATCH_BYTES = 7 * 1024
"""At most so much shared memory is a program's for factors and changes of layout, and the driver's."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """BV state rows and the warps of a program."""

    rows: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a launch depends on of a GPU.

    Attributes:
        tma: tiles come by TMA; without it every thread copies its part of them by cp.async.
        shared_bytes: shared memory of a multiprocessor.
    """

    tma: bool
    shared_bytes: int

    def holds_two(self, tile_bytes: int) -> bool:
        """Whether two programs with tiles and keys of so many bytes fit a multiprocessor."""
        return 2 * (tile_bytes + SCRATCH_BYTES) <= self.shared_bytes


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """TMA is for Hopper, where it was measured; newer GPUs have it too."""
    found = torch.cuda.get_device_properties(device)
    return Gpu((found.major, found.minor) == (9, 0), found.shared_memory_per_multiprocessor)


def record_rows(dims: Dims) -> int:
    """Committed records, as a number of rows that tensor cores take."""
    return 16 if dims.R - dims.T <= 16 else 32


@dataclass(frozen=True, slots=True)
class _Address:
    """What a descriptor needs of a tensor, without keeping its memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@functools.cache
def tile_layout(dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Layout of a tile [1, rows, BK] in shared memory."""
    return gl.NVMMASharedLayout(128, 8 * dtype.itemsize, 3)


@functools.lru_cache(maxsize=4096)
def _tile_descriptor(
    address: int, dtype: torch.dtype, slots: int, slot_rows: int, head_k_dim: int, slot_stride: int, rows: int
) -> TensorDescriptor:
    """TMA descriptor of checkpoints [slots, HV V, K] at `address`, with boxes of `rows` by BK."""
    shape, strides = [slots, slot_rows, head_k_dim], [slot_stride, head_k_dim, 1]
    return TensorDescriptor(_Address(address, dtype), shape, strides, [1, rows, BK.value], tile_layout(dtype))


def tile_descriptor(checkpoint: torch.Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of checkpoints [N, HV, V, K] with boxes of `rows` by BK."""
    slots, value_heads, head_v_dim, head_k_dim = checkpoint.shape
    address, dtype = checkpoint.data_ptr(), checkpoint.dtype
    return _tile_descriptor(address, dtype, slots, value_heads * head_v_dim, head_k_dim, checkpoint.stride(0), rows)


def constants(dims: Dims, dtype: torch.dtype, tiling: Tiling) -> dict[str, Any]:
    """What both kernels are compiled for, by name; `dtype` is the checkpoint's."""
    columns = 8 if dims.T <= 4 else 16
    return {
        'T': dims.T,
        'H': dims.H,
        'HV': dims.HV,
        'K': dims.K,
        'V': dims.V,
        'R': dims.R,
        'BV': tiling.rows,
        'N': columns,
        'J': record_rows(dims),
        'ROWS': row_layout(tiling.rows, columns, tiling.num_warps),
        'TILE': tile_layout(dtype),
        'num_warps': tiling.num_warps,
    }
