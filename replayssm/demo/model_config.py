"""config.json of a demo model, as the published Qwen3.5 checkpoints have it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replayssm.demo.specs import DemoSpec
from replayssm.demo.tokenizer import END_OF_TEXT, END_OF_TURN
from replayssm.random_weights import qwen3_5

_MAX_POSITIONS = 32768


def build_config(spec: DemoSpec, dtype: str, token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of config.json; `token_ids` are the special tokens'."""
    family = 'qwen3_5_moe' if spec.num_experts else 'qwen3_5'
    architecture = 'Qwen3_5MoeForConditionalGeneration' if spec.num_experts else 'Qwen3_5ForConditionalGeneration'
    return {
        'architectures': [architecture],
        'model_type': family,
        'dtype': dtype,
        'text_config': _text_config(spec, family, dtype, token_ids),
        'vision_config': {
            'model_type': f'{family}_vision',
            'depth': 1,
            'hidden_size': 64,
            'intermediate_size': 64,
            'num_heads': 2,
            'out_hidden_size': spec.hidden_size,
            'num_position_embeddings': 16,
        },
        'image_token_id': token_ids['<|image_pad|>'],
        'video_token_id': token_ids['<|video_pad|>'],
        'vision_start_token_id': token_ids['<|vision_start|>'],
        'vision_end_token_id': token_ids['<|vision_end|>'],
        'tie_word_embeddings': False,
    }


def _text_config(spec: DemoSpec, family: str, dtype: str, token_ids: Mapping[str, int]) -> dict[str, Any]:
    config = {
        'model_type': f'{family}_text',
        'dtype': dtype,
        'vocab_size': spec.vocab_size,
        'hidden_size': spec.hidden_size,
        'num_hidden_layers': spec.num_layers,
        'layer_types': [*['linear_attention'] * 3, 'full_attention'] * spec.num_blocks,
        'full_attention_interval': 4,
        'num_attention_heads': spec.attention_heads,
        'num_key_value_heads': spec.kv_heads,
        'head_dim': spec.attention_head_dim,
        'attn_output_gate': True,
        'linear_num_key_heads': spec.key_heads,
        'linear_num_value_heads': spec.value_heads,
        'linear_key_head_dim': spec.key_head_dim,
        'linear_value_head_dim': spec.value_head_dim,
        'linear_conv_kernel_dim': 4,
        'mtp_num_hidden_layers': 1,
        'max_position_embeddings': _MAX_POSITIONS,
        'rope_parameters': {
            'rope_type': 'default',
            'rope_theta': 10000.0,
            'partial_rotary_factor': 0.25,
            'mrope_section': _mrope_section(spec.attention_head_dim // 8),
            'mrope_interleaved': True,
        },
        'tie_word_embeddings': False,
        'eos_token_id': token_ids[END_OF_TURN],
        'pad_token_id': token_ids[END_OF_TEXT],
    }
    if spec.num_experts:
        return config | {
            'num_experts': spec.num_experts,
            'num_experts_per_tok': 2,
            'moe_intermediate_size': spec.intermediate_size,
            'shared_expert_intermediate_size': spec.intermediate_size,
        }
    return config | {'intermediate_size': spec.intermediate_size}


def _mrope_section(num_pairs: int) -> list[int]:
    """Split the rotated pairs of channels over time, height and width."""
    return [num_pairs - 2 * (num_pairs // 3), num_pairs // 3, num_pairs // 3]


def weight_shapes(folder: Path) -> dict[str, Any]:
    """Return name and shape of every weight that transformers expects for the config.json in `folder`."""
    from transformers import AutoConfig

    return qwen3_5.weight_shapes(AutoConfig.from_pretrained(folder))
