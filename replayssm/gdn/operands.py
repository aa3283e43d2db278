"""Operands of the decode kernels: what a launcher accepts, and how it hands it to a kernel."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from replayssm.config import MAX_BUFFER_LEN
from replayssm.cursor import CURSOR_COLUMNS, FLUSH, LENGTH, READ_ROW, SLOT, VALID, WRITE_ROW
from replayssm.layout import Gate, LayerState

MAX_WINDOW = 8
"""T of a verify step: one token and seven drafts."""

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of one launch, with the letters of `replayssm.layout`; B is the batch."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    R: int


class _Signature(NamedTuple):
    """What `validate` looks at of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def validate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    neg_exp_a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: LayerState,
    cursors: torch.Tensor,
    gate: Gate = 'scalar',
) -> Dims:
    """Check what the host can see without synchronising; the arguments are those of `reference.replay_decode`.

    A 'vector' gate makes `a`, `dt_bias` and `state.gate` those of `replayssm.kda.reference.replay_decode`.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong; the message names argument, expected and got.
    """
    tensors = (q, k, v, a, b, neg_exp_a, dt_bias, cursors, *state)
    return _validate(tuple(_Signature(x.shape, x.stride(), x.dtype, x.device) for x in tensors), gate)


def token_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with a contiguous last dimension, copied if need be.

    LMDeploy's convolution hands on the window of a single sequence transposed; of several it copies them itself.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.lru_cache(maxsize=1024)
def _validate(signatures: tuple[_Signature, ...], gate_kind: Gate) -> Dims:
    """The layers and steps of an engine share a few combinations, and checking one takes longer than a launch."""
    q, k, v, a, b, neg_exp_a, dt_bias, cursors, checkpoint, key, key_norm, delta, gate = signatures
    for name, tensor in (('k', k), ('v', v)):
        _expect(f'{name}.ndim', len(tensor.shape) == 4, 4, len(tensor.shape))
    (n_batch, n_tokens, n_heads, head_k_dim), (value_heads, head_v_dim) = k.shape, v.shape[2:]
    dims = Dims(n_batch, n_tokens, n_heads, value_heads, head_k_dim, head_v_dim, key_norm.shape[-1])
    _expect('window T', 1 <= dims.T <= MAX_WINDOW, f'1..{MAX_WINDOW}', dims.T)
    _expect('v.size(2)', dims.HV % dims.H == 0, f'a multiple of {dims.H} key heads', dims.HV)
    depth = dims.R - dims.T
    _expect('ring rows - window', 1 <= depth <= MAX_BUFFER_LEN, f'a buffer of 1..{MAX_BUFFER_LEN} records', depth)
    _expect('k.dtype', k.dtype in ACTIVATION_DTYPES, ACTIVATION_DTYPES, k.dtype)

    slots, tokens, ring = checkpoint.shape[0], (dims.B, dims.T), dims.R
    activation, number = (k.dtype,), ACTIVATION_DTYPES
    channels, records = ((), (torch.float32,)) if gate_kind == 'scalar' else ((dims.K,), activation)
    for name, tensor, leading, shape, dtypes in (
        ('q', q, 2, (*tokens, dims.H, dims.K), activation),
        ('k', k, 2, (*tokens, dims.H, dims.K), activation),
        ('v', v, 2, (*tokens, dims.HV, dims.V), number),
        ('a', a, 2, (*tokens, dims.HV, *channels), number),
        ('b', b, 2, (*tokens, dims.HV), number),
        ('neg_exp_a', neg_exp_a, 0, (dims.HV,), (torch.float32,)),
        ('dt_bias', dt_bias, 0, (dims.HV, *channels), number),
        ('cursors', cursors, 0, (dims.B, CURSOR_COLUMNS), (torch.int32,)),
        ('state.checkpoint', checkpoint, 1, (slots, dims.HV, dims.V, dims.K), STATE_DTYPES),
        ('state.key', key, 1, (slots, dims.H, ring, dims.K), activation),
        ('state.key_norm', key_norm, 1, (slots, dims.H, ring), (torch.float32,)),
        ('state.delta', delta, 1, (slots, dims.HV, ring, dims.V), STATE_DTYPES),
        ('state.gate', gate, 1, (slots, dims.HV, ring, *channels), records),
    ):
        _expect(f'{name}.shape', tensor.shape == shape, shape, tuple(tensor.shape))
        _expect(f'{name}.dtype', tensor.dtype in dtypes, dtypes, tensor.dtype)
        _expect(f'{name}.device', tensor.device == k.device, k.device, tensor.device)
        _expect_dense(name, tensor, leading)
    return dims


def _expect(name: str, holds: bool, expected: object, got: object) -> None:
    if not holds:
        raise ValueError(f'{name}: expected {expected}, got {got}')


def _expect_dense(name: str, tensor: _Signature, leading: int) -> None:
    """Dimensions behind the first `leading` ones must be contiguous."""
    dense = 1
    for size, stride in zip(reversed(tensor.shape[leading:]), reversed(tensor.strides[leading:]), strict=True):
        if size > 1 and stride != dense:
            raise ValueError(f'{name}: expected dimensions {leading}.. contiguous, got strides {tensor.strides}')
        dense *= size


def kernel_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    neg_exp_a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: LayerState,
    cursors: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> tuple[Any, ...]:
    """Positional arguments that both kernels share: pointers, scale, batch and token strides, slot strides."""
    strides = (stride for x in (q, k, v, a, b) for stride in x.stride()[:2])
    slots = (x.stride(0) for x in state)
    return (q, k, v, a, b, neg_exp_a, dt_bias, out, *state, cursors, scale, *strides, *slots)


@functools.cache
def debug_checks() -> bool:
    """Whether launches read the cursors back and check them, from REPLAYSSM_DEBUG; not for CUDA graphs."""
    value = os.environ.get('REPLAYSSM_DEBUG', '0')
    if value not in ('0', '1'):
        raise ValueError(f'REPLAYSSM_DEBUG: expected 0 or 1, got {value!r}')
    return value == '1'


def check_cursors(cursors: torch.Tensor, dims: Dims, slots: int) -> None:
    """Check a cursor table's values; synchronises with the device.

    Raises:
        ValueError: a value is out of range, or two rows name the same slot.
    """
    rows = cursors[cursors[:, SLOT] >= 0]
    for name, column, low, high in (
        ('slot', SLOT, 0, slots - 1),
        ('valid', VALID, 0, dims.R - dims.T),
        ('read row', READ_ROW, 0, dims.R - 1),
        ('write row', WRITE_ROW, 0, dims.R - 1),
        ('length', LENGTH, 0, dims.T),
        ('flush', FLUSH, 0, 1),
    ):
        values = rows[:, column]
        outside = values[(values < low) | (values > high)]
        _expect(f'cursors: {name}', outside.numel() == 0, f'{low}..{high}', outside.tolist())
    used = rows[:, SLOT]
    _expect('cursors: slot', used.unique().numel() == used.numel(), 'each slot once', used.tolist())
