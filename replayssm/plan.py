"""Capacity arithmetic: bytes per state slot with and without ReplaySSM, and the KV blocks that the difference buys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from replayssm.config import ReplayConfig, StateDtype
from replayssm.layout import Gate, Kind, StateLayout, StateTensor, kind_bytes, kv_blocks_gained, pool_tail, slot_bytes

RESERVED_SLOTS = 2
"""State slots that LMDeploy allocates beside those of sequences and prefix checkpoints."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a hybrid model before tensor parallelism.

    Attributes:
        linear_layers, key_heads, value_heads, key_dim, value_dim, conv_width: of the GDN or KDA layers.
        attention_layers, kv_heads, attention_dim: of the full-attention layers. Multi-head latent attention is one
            head of `attention_dim` numbers without values (`shared_kv`), which every rank holds.
        draft_layers: full-attention layers of the model's own draft head.
        dtype: of activations, convolution states and KV cache.
        gate: 'vector' for KDA.
        index_dim, index_pool: of the indexers, which cache `index_dim` numbers per `index_pool` tokens.
    """

    linear_layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    attention_layers: int
    kv_heads: int
    attention_dim: int
    draft_layers: int = 1
    dtype: torch.dtype = torch.bfloat16
    gate: Gate = 'scalar'
    shared_kv: bool = False
    index_dim: int = 0
    index_pool: int = 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a checkpoint's config.json.

        Raises:
            ValueError: it describes no model with GDN or KDA layers; the message names the missing key.
        """
        if config.get('model_type') == 'glm5_next':
            return _glm5_next_shape(config)
        text = config.get('text_config', config)
        try:
            layer_types = text['layer_types']
            return cls(
                linear_layers=layer_types.count('linear_attention'),
                key_heads=text['linear_num_key_heads'],
                value_heads=text['linear_num_value_heads'],
                key_dim=text['linear_key_head_dim'],
                value_dim=text['linear_value_head_dim'],
                conv_width=text['linear_conv_kernel_dim'],
                attention_layers=layer_types.count('full_attention'),
                kv_heads=text['num_key_value_heads'],
                attention_dim=text['head_dim'],
                draft_layers=text.get('mtp_num_hidden_layers', 0),
                dtype=getattr(torch, text.get('dtype') or config.get('dtype') or 'bfloat16'),
            )
        except KeyError as error:
            raise ValueError(f'config.json: expected a model with GDN or KDA layers, but {error} is missing') from None


def _glm5_next_shape(config: Mapping[str, Any]) -> ModelShape:
    # Published files leave layer types and the KDA sizes to be derived, and their keys have changed between releases.
    from transformers import Glm5NextConfig

    text = Glm5NextConfig.from_dict(dict(config)).text_config
    return ModelShape(
        linear_layers=text.layer_types.count('linear_attention'),
        key_heads=text.linear_num_heads,
        value_heads=text.linear_num_heads,
        key_dim=text.linear_head_dim,
        value_dim=text.linear_head_dim,
        conv_width=text.linear_conv_kernel_dim,
        attention_layers=text.layer_types.count('indexed_attention'),
        kv_heads=1,
        attention_dim=text.kv_lora_rank,
        draft_layers=getattr(text, 'num_nextn_predict_layers', 0),
        dtype=text.dtype or torch.bfloat16,
        gate='vector',
        shared_kv=True,
        index_dim=text.index_head_dim,
        index_pool=text.index_kpool,
    )


_GDN = ModelShape(
    linear_layers=30,
    key_heads=16,
    value_heads=32,
    key_dim=128,
    value_dim=128,
    conv_width=4,
    attention_layers=10,
    kv_heads=2,
    attention_dim=256,
)

_KDA = ModelShape(
    linear_layers=34,
    key_heads=64,
    value_heads=64,
    key_dim=128,
    value_dim=128,
    conv_width=4,
    attention_layers=11,
    kv_heads=1,
    attention_dim=512,
    gate='vector',
    shared_kv=True,
    index_dim=128,
    index_pool=4,
)

SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        'qwen3.5-35b-a3b': _GDN,
        'qwen3.5-9b': replace(_GDN, linear_layers=24, attention_layers=8, kv_heads=4),
        'glm-5.3-flash': _KDA,
    }
)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How the model is run; names are LMDeploy's where LMDeploy has the option.

    Attributes:
        num_drafts: speculative tokens per step, 0 without speculative decoding.
        stock_dtype: dtype of the states in stock LMDeploy; None is that of the checkpoint.
    """

    tp: int = 1
    num_drafts: int = 0
    max_batch_size: int = 64
    prefix_cache_state_budget: int = 0
    block_size: int = 64
    cache_max_entry_count: float = 0.8
    stock_dtype: StateDtype | None = None
    replay: ReplayConfig = field(default_factory=ReplayConfig)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank allocates for states.

    Attributes:
        slots: state slots of the pool.
        stock_slot_bytes, replay_slot_bytes: bytes of one slot, by kind.
        kv_block_bytes: bytes of one block of the paged KV cache, draft layers included.
        kv_blocks_gained: blocks that the bytes saved make room for; negative when ReplaySSM takes more.
    """

    slots: int
    stock_slot_bytes: Mapping[Kind, int]
    replay_slot_bytes: Mapping[Kind, int]
    kv_block_bytes: int
    kv_blocks_gained: int

    @property
    def stock_bytes(self) -> int:
        """Bytes of the whole pool in stock LMDeploy."""
        return self.slots * sum(self.stock_slot_bytes.values())

    @property
    def replay_bytes(self) -> int:
        """Bytes of the whole pool with ReplaySSM."""
        return self.slots * sum(self.replay_slot_bytes.values())


def load_shape(model: str) -> ModelShape:
    """Return a named shape, or that of the checkpoint in folder `model`.

    Raises:
        ValueError: neither a name nor a folder with a config.json.
    """
    if model in SHAPES:
        return SHAPES[model]
    path = Path(model) / 'config.json'
    if not path.is_file():
        raise ValueError(f'model: expected {", ".join(SHAPES)} or a folder with a config.json, got {model!r}')
    return ModelShape.from_config(json.loads(path.read_text()))


def make_plan(shape: ModelShape, options: PlanOptions) -> Plan:
    """Work out what one of `options.tp` ranks allocates.

    Raises:
        ValueError: the heads do not divide by `tp`, or the drafts do not fit the buffer.
    """
    layout = _layout(shape, options, options.replay)
    stock_dtype = options.stock_dtype or options.replay.checkpoint_dtype
    stock = _layout(shape, options, replace(options.replay, checkpoint_dtype=stock_dtype)).stock_tensors()
    slots = options.max_batch_size + RESERVED_SLOTS + options.prefix_cache_state_budget
    saved_bytes = slots * (slot_bytes(stock) - slot_bytes(layout.tensors()))
    block_bytes = _kv_block_bytes(shape, options)
    return Plan(
        slots=slots,
        stock_slot_bytes=kind_bytes(stock),
        replay_slot_bytes=kind_bytes(layout.tensors()),
        kv_block_bytes=block_bytes,
        kv_blocks_gained=kv_blocks_gained(saved_bytes, options.cache_max_entry_count, block_bytes),
    )


def _layout(shape: ModelShape, options: PlanOptions, config: ReplayConfig) -> StateLayout:
    key_heads = _divide('key heads', shape.key_heads, options.tp)
    value_heads = _divide('value heads', shape.value_heads, options.tp)
    channels = 2 * key_heads * shape.key_dim + value_heads * shape.value_dim
    return StateLayout(
        num_layers=shape.linear_layers,
        num_k_heads=key_heads,
        num_v_heads=value_heads,
        head_k_dim=shape.key_dim,
        head_v_dim=shape.value_dim,
        conv_shape=(shape.linear_layers, channels, shape.conv_width + options.num_drafts),
        conv_dtype=shape.dtype,
        activation_dtype=shape.dtype,
        num_drafts=options.num_drafts,
        config=config,
        gate=shape.gate,
        further=_index_tails(shape, options),
    )


def _index_tails(shape: ModelShape, options: PlanOptions) -> tuple[StateTensor, ...]:
    if not shape.index_dim:
        return ()
    layers = _attention_layers(shape, options)
    return (pool_tail(layers, shape.index_pool, options.num_drafts, shape.index_dim, shape.dtype),)


def _attention_layers(shape: ModelShape, options: PlanOptions) -> int:
    return shape.attention_layers + (shape.draft_layers if options.num_drafts else 0)


def _divide(name: str, heads: int, tp: int) -> int:
    if heads % tp:
        raise ValueError(f'tp: expected a divisor of {heads} {name}, got {tp}')
    return heads // tp


def _kv_block_bytes(shape: ModelShape, options: PlanOptions) -> int:
    layers = _attention_layers(shape, options)
    if shape.shared_kv:
        numbers = shape.attention_dim + shape.index_dim // shape.index_pool
        return layers * numbers * options.block_size * shape.dtype.itemsize
    # With more ranks than KV heads LMDeploy gives every rank a copy of one.
    heads = max(1, shape.kv_heads // options.tp)
    return 2 * layers * heads * shape.attention_dim * options.block_size * shape.dtype.itemsize
