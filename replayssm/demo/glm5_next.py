"""Tiny models of the GLM-5.3-Flash architecture: config.json and weights under the published checkpoints' names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from replayssm.demo.specs import VOCAB_SIZE, Glm5NextSpec
from replayssm.demo.tokenizer import END_OF_TEXT, END_OF_TURN
from replayssm.demo.weights import named_normal
from replayssm.random_weights import glm5_next

_MAX_POSITIONS = 32768
_HEAD_GAIN = 4.0
_UNREADABLE_GAIN = 0.05
_DRAFT_HIDDEN_GAIN = 0.1
_DRAFT_LAYER_GAIN = 0.05
_OUTPUT_PROJECTIONS = ('o_proj.weight', 'down_proj.weight')


def build_config(spec: Glm5NextSpec, dtype: str, token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of config.json; `token_ids` are the special tokens'."""
    return {
        'architectures': ['Glm5NextForConditionalGeneration'],
        'model_type': 'glm5_next',
        'dtype': dtype,
        'text_config': _text_config(spec, dtype, token_ids),
        'vision_config': {
            'model_type': 'glm5_next_vision',
            'depth': 1,
            'hidden_size': 32,
            'intermediate_size': 32,
            'num_heads': 2,
            'out_hidden_size': spec.hidden_size,
            'projection_intermediate_size': 32,
        },
        'image_token_id': token_ids['<|image_pad|>'],
        'video_token_id': token_ids['<|video_pad|>'],
        'image_start_token_id': token_ids['<|vision_start|>'],
        'image_end_token_id': token_ids['<|vision_end|>'],
        'tie_word_embeddings': False,
    }


def _text_config(spec: Glm5NextSpec, dtype: str, token_ids: Mapping[str, int]) -> dict[str, Any]:
    return _sizes(spec) | {
        'model_type': 'glm5_next_text',
        'dtype': dtype,
        'num_experts_per_tok': 2,
        'routed_scaling_factor': 2.5,
        'swiglu_limit': spec.swiglu_limit,
        'linear_lower_bound': -5.0,
        'num_key_value_heads': spec.attention_heads,
        'qk_rope_head_dim': 0,
        'index_topk': spec.index_top_tokens,
        'index_share_for_mtp_iteration': True,
        'max_position_embeddings': _MAX_POSITIONS,
        'eos_token_id': token_ids[END_OF_TURN],
        'pad_token_id': token_ids[END_OF_TEXT],
    }


def _sizes(spec: Glm5NextSpec) -> dict[str, Any]:
    """What the shapes of the weights follow from."""
    return {
        'vocab_size': VOCAB_SIZE,
        'hidden_size': spec.hidden_size,
        'num_hidden_layers': spec.num_layers,
        'layer_types': list(spec.layer_types),
        'mlp_layer_types': ['dense'] + ['sparse'] * (spec.num_layers - 1),
        'intermediate_size': spec.intermediate_size,
        'moe_intermediate_size': spec.expert_size,
        'n_routed_experts': spec.num_experts,
        'n_shared_experts': 1,
        'linear_num_heads': spec.linear_heads,
        'linear_head_dim': spec.linear_head_dim,
        'linear_conv_kernel_dim': 4,
        'num_attention_heads': spec.attention_heads,
        'q_lora_rank': spec.q_rank,
        'kv_lora_rank': spec.kv_rank,
        'qk_nope_head_dim': spec.key_dim,
        'v_head_dim': spec.value_dim,
        'index_n_heads': spec.index_heads,
        'index_head_dim': spec.index_dim,
        'index_kpool': 4,
        'hc_mult': 4,
        'num_nextn_predict_layers': 1,
    }


def build_weights(spec: Glm5NextSpec, readable_tokens: Iterable[int]) -> dict[str, torch.Tensor]:
    """Return float32 weights of the text model and the draft layer, by checkpoint name.

    Args:
        readable_tokens: the only tokens that the model is likely to emit.
    """
    weights = {name: _weight(spec, name, shape) for name, shape in weight_shapes(spec)}
    row_gain = torch.full((VOCAB_SIZE, 1), _UNREADABLE_GAIN)
    row_gain[list(readable_tokens)] = 1.0
    weights['lm_head.weight'] *= _HEAD_GAIN * row_gain
    if spec.draft_follows_target:
        # Next to the embedding of the current token the hidden state adds little, as in the target.
        identity = torch.eye(spec.hidden_size)
        draft = f'{glm5_next.PREFIX}layers.{spec.num_layers}.'
        weights[f'{draft}eh_proj.weight'] = torch.cat((identity, _DRAFT_HIDDEN_GAIN * identity), dim=1)
        weights[f'{draft}enorm.weight'] = torch.ones(spec.hidden_size)
        weights[f'{draft}shared_head.norm.weight'] = weights[f'{glm5_next.PREFIX}norm.weight'].clone()
    return weights


def weight_shapes(spec: Glm5NextSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield checkpoint name and shape of every weight."""
    return glm5_next.weight_shapes(SimpleNamespace(**_sizes(spec)))


def _weight(spec: Glm5NextSpec, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A weight with nothing at the defaults of zero and one, which would hide mistakes."""
    normal = named_normal(spec.seed, name, shape)
    if name.endswith('dt_bias'):
        return normal - 2
    if name.endswith(('A_log', '_base', 'compress_ape')):
        return 0.5 * normal
    if name.endswith(('norm.weight', '_scale')):
        return 1 + 0.1 * normal
    if name.endswith(('embed_tokens.weight', 'conv1d.weight')):
        return normal if 'embed' in name else 0.5 * normal
    if len(shape) == 1:
        return 0.1 * normal
    weight = normal * (1.5 / shape[-1] ** 0.5)
    if name.endswith(_OUTPUT_PROJECTIONS):
        is_draft = f'layers.{spec.num_layers}.' in name and spec.draft_follows_target
        weight *= _DRAFT_LAYER_GAIN if is_draft else spec.layer_gain
    return weight
