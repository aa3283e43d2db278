"""Names and shapes of a GLM-5.3-Flash checkpoint, text model and draft layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from replayssm.random_weights import Weight

PREFIX = 'model.language_model.'
_FP8 = ('_proj.weight', '.kv_a_proj_with_mqa.weight', '.wq_b.weight', '.wk.weight')
_NEVER_FP8 = ('eh_proj.weight', 'weights_proj.weight')

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def weights_of(text: Any, quantization: Mapping[str, Any]) -> Iterator[Weight]:
    """Yield every tensor of a checkpoint.

    Args:
        text: text config.
        quantization: `quantization_config` of config.json, empty without one.
    """
    kept = quantization.get('modules_to_not_convert') or ()
    draft = f'{PREFIX}layers.{text.num_hidden_layers}.'
    for name, shape in weight_shapes(text):
        is_fp8 = bool(quantization) and name.endswith(_FP8) and not name.endswith(_NEVER_FP8)
        # LMDeploy's rule: a module is left out when its name is part of one on the list.
        is_fp8 = is_fp8 and not any(name.removesuffix('.weight') in module for module in kept)
        norm = 1.0 if name.endswith('norm.weight') else None
        yield Weight(name, shape, name.startswith(draft), is_fp8, norm)


def weight_shapes(text: Any) -> Shapes:
    """Yield checkpoint name and shape of every weight."""
    hidden = text.hidden_size
    yield f'{PREFIX}embed_tokens.weight', (text.vocab_size, hidden)
    yield f'{PREFIX}norm.weight', (hidden,)
    yield 'lm_head.weight', (text.vocab_size, hidden)
    drafts = ['draft'] * getattr(text, 'num_nextn_predict_layers', 0)
    for index, layer_type in enumerate((*text.layer_types, *drafts)):
        shapes = dict(_linear_attention(text) if layer_type == 'linear_attention' else _attention(text))
        is_dense = layer_type != 'draft' and text.mlp_layer_types[index] == 'dense'
        shapes |= dict(_mlp('mlp', hidden, text.intermediate_size) if is_dense else _experts(text))
        shapes |= {f'{name}_layernorm.weight': (hidden,) for name in ('input', 'post_attention')}
        if layer_type == 'draft':
            shapes |= {f'{name}.weight': (hidden,) for name in ('enorm', 'hnorm', 'shared_head.norm')}
            shapes['eh_proj.weight'] = (hidden, 2 * hidden)
        else:
            streams = text.hc_mult
            mixed = streams * (streams + 2)
            for block in ('attn', 'ffn'):
                shapes |= {f'hc_{block}_fn': (mixed, streams * hidden), f'hc_{block}_base': (mixed,)}
                shapes[f'hc_{block}_scale'] = (3,)
        yield from ((f'{PREFIX}layers.{index}.{name}', shape) for name, shape in shapes.items())


def _linear_attention(text: Any) -> Shapes:
    hidden, heads, dim = text.hidden_size, text.linear_num_heads, text.linear_head_dim
    for name in 'qkv':
        yield f'self_attn.{name}_proj.weight', (heads * dim, hidden)
        yield f'self_attn.{name}_conv1d.weight', (heads * dim, 1, text.linear_conv_kernel_dim)
    for name in 'fg':
        yield f'self_attn.{name}_a_proj.weight', (dim, hidden)
        yield f'self_attn.{name}_b_proj.weight', (heads * dim, dim)
    yield 'self_attn.b_proj.weight', (heads, hidden)
    yield 'self_attn.A_log', (heads,)
    yield 'self_attn.dt_bias', (heads * dim,)
    yield 'self_attn.o_norm.weight', (dim,)
    yield 'self_attn.o_proj.weight', (hidden, heads * dim)


def _attention(text: Any) -> Shapes:
    hidden, heads, index_dim = text.hidden_size, text.num_attention_heads, text.index_head_dim
    key_dim, value_dim = text.qk_nope_head_dim, text.v_head_dim
    yield 'self_attn.q_a_proj.weight', (text.q_lora_rank, hidden)
    yield 'self_attn.q_a_layernorm.weight', (text.q_lora_rank,)
    yield 'self_attn.q_b_proj.weight', (heads * key_dim, text.q_lora_rank)
    yield 'self_attn.kv_a_proj_with_mqa.weight', (text.kv_lora_rank, hidden)
    yield 'self_attn.kv_a_layernorm.weight', (text.kv_lora_rank,)
    yield 'self_attn.kv_b_proj.weight', (heads * (key_dim + value_dim), text.kv_lora_rank)
    yield 'self_attn.o_proj.weight', (hidden, heads * value_dim)
    yield 'self_attn.indexer.wq_b.weight', (text.index_n_heads * index_dim, text.q_lora_rank)
    yield 'self_attn.indexer.wk.weight', (index_dim, hidden)
    yield 'self_attn.indexer.k_norm.weight', (index_dim,)
    yield 'self_attn.indexer.k_norm.bias', (index_dim,)
    yield 'self_attn.indexer.weights_proj.weight', (text.index_n_heads, hidden)
    yield 'self_attn.indexer.index_kpool_compress_ape', (text.index_kpool, index_dim)
    yield 'self_attn.indexer.index_kpool_compress_gate', (index_dim, hidden)


def _experts(text: Any) -> Shapes:
    yield 'mlp.gate.weight', (text.n_routed_experts, text.hidden_size)
    yield 'mlp.gate.e_score_correction_bias', (text.n_routed_experts,)
    width = text.moe_intermediate_size
    for index in range(text.n_routed_experts):
        yield from _mlp(f'mlp.experts.{index}', text.hidden_size, width)
    yield from _mlp('mlp.shared_experts', text.hidden_size, width * text.n_shared_experts)


def _mlp(name: str, hidden: int, width: int) -> Shapes:
    yield f'{name}.gate_proj.weight', (width, hidden)
    yield f'{name}.up_proj.weight', (width, hidden)
    yield f'{name}.down_proj.weight', (hidden, width)
