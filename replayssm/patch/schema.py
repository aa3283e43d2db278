"""The state slot that LMDeploy allocates: a checkpoint, its ring and its cursor in place of 1 + drafts states.

Every model config carries its `StateLayout` as `state_layout`, also with ReplaySSM off, for the byte counts that are
reported; `replay` beside it says whether the slots really have that layout. Both travel to worker processes with the
config. LMDeploy sizes, copies and zeroes slots from `states_shapes`, so the rest of it needs no change.
"""

from __future__ import annotations

from typing import Any

import torch
from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.engine.cache_engine import StateCacheEngine
from lmdeploy.pytorch.engine.engine import Engine

from replayssm.config import ReplayConfig
from replayssm.layout import StateLayout, pool_tail
from replayssm.patch import compat
from replayssm.patching import Patches

COUNTERS = 'replay_counters'
"""Name, among LMDeploy's named state caches, of an int64 tensor that is no slot's: see `COUNTER_FIELDS`."""
COUNTER_FIELDS = ('decode_steps', 'windows', 'flushes', 'records', 'replayed_records', 'rejected_records')


def layout_of(model_config: Any) -> StateLayout | None:
    """The layout of the model's state slots if they are kept by ReplaySSM."""
    return model_config.state_layout if getattr(model_config, 'replay', False) else None


def install(patches: Patches, replay: ReplayConfig | None) -> None:
    """Patch the model config, and with `replay` the engine's checks and the state cache."""

    @patches.wrap(ModelConfig, 'from_hf_config')
    def from_hf_config(build: Any, hf_config: Any, model_path: str | None = None, **options: Any) -> Any:
        is_target = not options.get('is_draft_model', False)
        if replay is not None and is_target:
            dist_config = options.get('dist_config')
            tp = dist_config.attn_tp if dist_config is not None else 1
            compat.check_model(hf_config, tp, options.get('spec_method'))
        config = build(hf_config, model_path, **options)
        if is_target and hf_config.model_type in compat.SUPPORTED_MODEL_TYPES:
            _declare(config, options.get('num_spec_tokens', 0), replay)
        return config

    if replay is None:
        return

    @patches.wrap(Engine, 'from_pretrained')
    def from_pretrained(
        build: Any, path: str, engine_config: Any = None, speculative_config: Any = None, **options: Any
    ) -> Any:
        compat.check_engine(engine_config, speculative_config)
        return build(path, engine_config=engine_config, speculative_config=speculative_config, **options)

    @patches.wrap(StateCacheEngine, '__init__')
    def init_state_cache(init: Any, self: Any, cache_config: Any, model_config: Any) -> None:
        init(self, cache_config, model_config)
        if layout_of(model_config) is not None:
            device = self.state_caches[0].device
            self._named_state_caches[COUNTERS] = torch.zeros(len(COUNTER_FIELDS), dtype=torch.int64, device=device)


def _declare(config: Any, num_drafts: int, replay: ReplayConfig | None) -> None:
    """Set `state_layout` and `replay` on a model config, and with `replay` its `states_shapes`."""
    layout = (_kda_layout if config.hf_config.model_type == 'glm5_next' else _gdn_layout)(config, num_drafts, replay)
    config.state_layout, config.replay = layout, replay is not None
    if replay is not None:
        config.states_shapes = [(tensor.shape, tensor.dtype) for tensor in layout.tensors()]
    elif layout.further:
        config.states_shapes = [(tensor.shape, tensor.dtype) for tensor in layout.stock_tensors()]


def _gdn_layout(config: Any, num_drafts: int, replay: ReplayConfig | None) -> StateLayout:
    text = config.hf_config.text_config
    (conv_shape, conv_dtype), (state_shape, state_dtype) = config.states_shapes
    heads, head_v_dim, head_k_dim = state_shape[-3:]
    return StateLayout(
        num_layers=state_shape[0],
        num_k_heads=heads * text.linear_num_key_heads // text.linear_num_value_heads,
        num_v_heads=heads,
        head_k_dim=head_k_dim,
        head_v_dim=head_v_dim,
        conv_shape=conv_shape,
        conv_dtype=conv_dtype,
        activation_dtype=config.dtype,
        num_drafts=num_drafts,
        config=replay or _stock_config(num_drafts, state_dtype),
    )


def _kda_layout(config: Any, num_drafts: int, replay: ReplayConfig | None) -> StateLayout:
    """Declared here with the tail rings of the indexers, the draft layer's included, in the model's own dtype."""
    text = config.hf_config.text_config
    (conv_shape, _), (state_shape, state_dtype) = config.states_shapes
    heads, head_v_dim, head_k_dim = state_shape[-3:]
    tails = config.num_layers + (text.num_nextn_predict_layers if num_drafts else 0)
    return StateLayout(
        num_layers=state_shape[0],
        num_k_heads=heads,
        num_v_heads=heads,
        head_k_dim=head_k_dim,
        head_v_dim=head_v_dim,
        conv_shape=conv_shape,
        conv_dtype=config.dtype,
        activation_dtype=config.dtype,
        num_drafts=num_drafts,
        config=replay or _stock_config(num_drafts, state_dtype),
        gate='vector',
        further=(pool_tail(tails, text.index_kpool, num_drafts, text.index_head_dim, config.dtype),),
    )


def _stock_config(num_drafts: int, state_dtype: torch.dtype) -> ReplayConfig:
    return ReplayConfig(1 + num_drafts, 'float32' if state_dtype == torch.float32 else 'bfloat16')
