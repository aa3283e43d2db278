"""StateLayout: the only place where shapes, dtypes and bytes of a state slot are computed.

Dimensions, used with the same letters everywhere:

    N  state slots of the pool          T  tokens of a decode window, 1 + drafts
    H  key heads, HV value heads        K, V  head dimensions of keys and values
    L  buffer length, committed records a checkpoint may carry
    R  rows of the ring, L + T: a window appended over L live records overwrites none of them
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from replayssm.config import ReplayConfig

Kind = Literal['conv', 'checkpoint', 'ring', 'cursor', 'index']
Gate = Literal['scalar', 'vector']
"""One forget gate per value head (GDN), or one per value head and key channel (KDA)."""

SLOT_ALIGNMENT_BYTES = 256
"""LMDeploy pads every tensor of a packed state slot to a multiple of this (`CacheDesc.alignment`)."""

CURSOR_FIELDS = ('checkpoint_pos', 'end_pos')
"""Per slot, int32: absolute position that the checkpoint stands at, and position behind the newest record."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a state slot: `shape` is per slot and starts with the layer dimension (cursors have none)."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def data_bytes(self) -> int:
        """Bytes of one slot without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of one slot with LMDeploy's padding."""
        return -(-self.data_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


class LayerState(NamedTuple):
    """Views of one layer's state in the pool; the slot stride is the pool's, inner dimensions are contiguous.

    The ring row of absolute position p is `p mod R`. Rows hold the raw key, so that products with it are exact in
    its own dtype; its norm is applied afterwards.
    """

    checkpoint: torch.Tensor
    """[N, HV, V, K], checkpoint dtype."""
    key: torch.Tensor
    """[N, H, R, K], activation dtype: keys before the l2 norm."""
    key_norm: torch.Tensor
    """[N, H, R] float32: 1 / |k|, eps inside the root."""
    delta: torch.Tensor
    """[N, HV, R, V], record dtype: d = beta (v - S k), the delta-rule update."""
    gate: torch.Tensor
    """GDN: [N, HV, R] float32, log space: sum of gates since the checkpoint, the row's own included.
    KDA: [N, HV, R, K], activation dtype: raw logits of the row's own gates."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """State of one tensor-parallel rank's linear-attention layers, with ReplaySSM and as stock LMDeploy keeps it.

    Attributes:
        num_layers: linear-attention layers.
        num_k_heads, num_v_heads, head_k_dim, head_v_dim: H, HV, K, V of this rank.
        conv_shape: per slot, (layers, channels, width + drafts); the same with and without ReplaySSM.
        conv_dtype, activation_dtype: dtypes of the convolution state and of the model's activations.
        num_drafts: speculative tokens verified beside the committed one, 0 without speculative decoding.
        config: ReplaySSM's options.
        gate: what a record keeps of the forget gate, see `LayerState.gate`.
        further: tensors of the slot that belong to other layers, the same with and without ReplaySSM.

    Raises:
        ValueError: the window does not fit the buffer, or HV is no multiple of H.
    """

    num_layers: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_shape: tuple[int, ...]
    conv_dtype: torch.dtype
    activation_dtype: torch.dtype
    num_drafts: int
    config: ReplayConfig
    gate: Gate = 'scalar'
    further: tuple[StateTensor, ...] = ()

    def __post_init__(self) -> None:
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f'num_v_heads: expected a multiple of num_k_heads={self.num_k_heads}, got {self.num_v_heads}'
            )
        if self.config.buffer_len < self.window:
            raise ValueError(
                f'buffer_len: expected at least {self.window} (1 token and {self.num_drafts} drafts), '
                f'got {self.config.buffer_len}'
            )

    @property
    def window(self) -> int:
        """T, the most tokens of one decode step."""
        return 1 + self.num_drafts

    @property
    def ring_rows(self) -> int:
        """R."""
        return self.config.buffer_len + self.window

    @property
    def checkpoint_dtype(self) -> torch.dtype:
        """Dtype of the checkpoint, and of stock LMDeploy's states in `stock_tensors`."""
        return _torch_dtype(self.config.checkpoint_dtype)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one sequence's recurrent state over all layers, without padding."""
        return sum(tensor.data_bytes for tensor in self.tensors() if tensor.kind == 'checkpoint')

    @property
    def record_bytes(self) -> int:
        """Bytes of one record over all layers, without padding."""
        return sum(tensor.data_bytes for tensor in self.tensors() if tensor.kind == 'ring') // self.ring_rows

    def tensors(self) -> tuple[StateTensor, ...]:
        """Tensors of a slot with ReplaySSM: conv, checkpoint, the four rings of `LayerState`, `further`, cursor."""
        n, h, hv, r = self.num_layers, self.num_k_heads, self.num_v_heads, self.ring_rows
        return (
            StateTensor('conv', self.conv_shape, self.conv_dtype),
            StateTensor('checkpoint', (n, hv, self.head_v_dim, self.head_k_dim), self.checkpoint_dtype),
            StateTensor('ring', (n, h, r, self.head_k_dim), self.activation_dtype),
            StateTensor('ring', (n, h, r), torch.float32),
            StateTensor('ring', (n, hv, r, self.head_v_dim), _torch_dtype(self.config.record_dtype)),
            self._gate_records(),
            *self.further,
            StateTensor('cursor', (len(CURSOR_FIELDS),), torch.int32),
        )

    def _gate_records(self) -> StateTensor:
        n, hv, r = self.num_layers, self.num_v_heads, self.ring_rows
        if self.gate == 'scalar':
            return StateTensor('ring', (n, hv, r), torch.float32)
        return StateTensor('ring', (n, hv, r, self.head_k_dim), self.activation_dtype)

    def stock_tensors(self) -> tuple[StateTensor, ...]:
        """Tensors of a slot in stock LMDeploy: under speculative decoding it keeps 1 + drafts whole states."""
        snapshots = (self.window,) if self.num_drafts else ()
        shape = (self.num_layers, *snapshots, self.num_v_heads, self.head_v_dim, self.head_k_dim)
        return (
            StateTensor('conv', self.conv_shape, self.conv_dtype),
            StateTensor('checkpoint', shape, self.checkpoint_dtype),
            *self.further,
        )

    def layer(self, caches: Sequence[torch.Tensor], index: int) -> LayerState:
        """Views of layer `index` in the pool's tensors, given in the order of `tensors()`."""
        return LayerState(*(cache[:, index] for cache in caches[1:6]))


def pool_tail(layers: int, pool: int, num_drafts: int, dim: int, dtype: torch.dtype) -> StateTensor:
    """The newest tokens of an indexer that keeps one key per `pool` tokens: [layers, rows, 2, dim], row p mod rows.

    A pool of which a draft was the last token is made again when the draft was rejected, so its other tokens must
    outlive the whole window: pool - 1 of them before 1 + drafts new ones. A token is its key and its gate logits.
    """
    return StateTensor('index', (layers, pool + num_drafts, 2, dim), dtype)


def slot_bytes(tensors: Sequence[StateTensor]) -> int:
    """Bytes of one state slot."""
    return sum(tensor.nbytes for tensor in tensors)


def kind_bytes(tensors: Sequence[StateTensor]) -> dict[Kind, int]:
    """Bytes of one state slot by kind."""
    sizes: dict[Kind, int] = {}
    for tensor in tensors:
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.nbytes
    return sizes


def kv_blocks_gained(saved_bytes: int, cache_share: float, block_bytes: int) -> int:
    """Blocks of the KV cache that `saved_bytes` of state memory make room for; negative when more is held than saved.

    LMDeploy gives `cache_share` (its `cache_max_entry_count`) of free memory to blocks of `block_bytes`.
    """
    return int(saved_bytes * cache_share / block_bytes)


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
