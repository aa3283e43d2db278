"""config.json of the models that benchmarks run on random weights: real widths, as many layers as asked for.

With `shard` the widths are those that one of so many tensor-parallel ranks has, to be run on one card.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

FP8_BLOCK = 128
Config = dict[str, Any]


def write_config(
    path: Path, model: str, layers: int | None = None, shard: int = 1, fp8: bool = False, experts: int = 0
) -> Config:
    """Write the config.json of `model` into folder `path` and return it.

    Args:
        model: a key of `MODELS`.
        layers: None for all of them.
        fp8: weights in blocks of 128 x 128.
        experts: only so many, and all of them chosen; 0 for the model's own.
    """
    config = MODELS[model](layers, shard)
    if experts:
        text = config['text_config']
        count = 'num_experts' if 'num_experts' in text else 'n_routed_experts'
        text |= {count: experts, 'num_experts_per_tok': experts}
    if fp8:
        config['quantization_config'] = _fp8(config)
    path.mkdir(parents=True, exist_ok=True)
    (path / 'config.json').write_text(json.dumps(config))
    return config


def qwen35_35b_a3b(layers: int | None = None, shard: int = 1) -> Config:
    """Qwen3.5-35B-A3B; transformers' defaults are that model."""
    from transformers import Qwen3_5MoeConfig

    config = Qwen3_5MoeConfig().to_dict()
    text = config['text_config']
    rope = {'rope_type': 'default', 'rope_theta': 10_000_000, 'partial_rotary_factor': 0.25}
    text |= _cut(text, layers) | {
        'mtp_num_hidden_layers': 1,
        'mtp_use_dedicated_embeddings': False,
        'attn_output_gate': True,
        'full_attention_interval': 4,
        'max_position_embeddings': 262144,
        'dtype': 'bfloat16',
        'rope_parameters': rope | {'mrope_section': [11, 11, 10], 'mrope_interleaved': True},
    }
    widths = ('linear_num_key_heads', 'linear_num_value_heads', 'num_attention_heads', 'moe_intermediate_size')
    _divide(text, shard, *widths, 'shared_expert_intermediate_size', 'vocab_size')
    # With more ranks than KV heads every rank has a copy of one.
    text['num_key_value_heads'] = max(1, text['num_key_value_heads'] // shard)
    return config | {'architectures': ['Qwen3_5MoeForConditionalGeneration'], 'dtype': 'bfloat16'}


def glm_53_flash(layers: int | None = None, shard: int = 1) -> Config:
    """GLM-5.3-Flash; transformers' defaults are that model but for the pools of its indexers and its draft layer."""
    from transformers import Glm5NextConfig

    config = Glm5NextConfig(text_config={}).to_dict()
    text = config['text_config']
    text |= _cut(text, layers) | {
        'index_kpool': 4,
        'num_nextn_predict_layers': 1,
        'index_share_for_mtp_iteration': True,
        'dtype': 'bfloat16',
        'eos_token_id': 1,
        'pad_token_id': 0,
    }
    heads = ('linear_num_heads', 'num_attention_heads', 'num_key_value_heads')
    _divide(text, shard, *heads, 'intermediate_size', 'moe_intermediate_size', 'vocab_size')
    return config | {'architectures': ['Glm5NextForConditionalGeneration'], 'dtype': 'bfloat16'}


MODELS: Mapping[str, Callable[[int | None, int], Config]] = MappingProxyType(
    {'qwen3.5-35b-a3b': qwen35_35b_a3b, 'glm-5.3-flash': glm_53_flash}
)
METHODS: Mapping[str, str] = MappingProxyType({'qwen3.5-35b-a3b': 'qwen3_5_mtp', 'glm-5.3-flash': 'deepseek_mtp'})
"""LMDeploy's names of drafting by the model's own layer."""


def _cut(text: Config, layers: int | None) -> Config:
    """What changes with the number of layers; the first ones are kept."""
    count = layers or text['num_hidden_layers']
    if count > text['num_hidden_layers']:
        raise ValueError(f'layers: expected at most {text["num_hidden_layers"]}, got {count}')
    lists = ('layer_types', 'mlp_layer_types', 'indexer_types')
    return {'num_hidden_layers': count} | {name: text[name][:count] for name in lists if text.get(name)}


def _divide(text: Config, shard: int, *names: str) -> None:
    for name in names:
        if text[name] % shard:
            raise ValueError(f'shard: expected a divisor of {name}={text[name]}, got {shard}')
        text[name] //= shard


def _fp8(config: Config) -> Config:
    """How FP8 checkpoints describe themselves; `b_proj` of KDA has half a block of rows, which ranks cannot share."""
    text = config['text_config']
    names = [f'model.language_model.layers.{i}.self_attn.b_proj' for i in range(text['num_hidden_layers'])]
    return {
        'quant_method': 'fp8',
        'fmt': 'e4m3',
        'activation_scheme': 'dynamic',
        'weight_block_size': [FP8_BLOCK, FP8_BLOCK],
        'modules_to_not_convert': [*names, 'lm_head'],
    }
