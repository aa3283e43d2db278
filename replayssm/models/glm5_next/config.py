"""LMDeploy's model config of a `glm5_next` checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.configurations import AutoModelConfigBuilder

MODEL_TYPE = 'glm5_next'
ARCHITECTURE = 'Glm5NextForConditionalGeneration'
DRAFT_ARCHITECTURE = 'Glm5NextDraftModel'
SPECULATIVE_METHOD = 'deepseek_mtp'
"""LMDeploy's name of drafting with one predictor layer on the target's normalised hidden states."""


class Glm5NextConfigBuilder:
    """Found by LMDeploy through its list of builders; no subclass of its base, which would enter the list by itself."""

    @classmethod
    def condition(cls, hf_config: Any) -> bool:
        """Whether `hf_config` is of this model."""
        return bool(hf_config.model_type == MODEL_TYPE)

    @classmethod
    def build(
        cls,
        hf_config: Any,
        model_path: str | None = None,
        tp: int = 1,
        is_draft_model: bool = False,
        spec_method: str | None = None,
        num_spec_tokens: int = 0,
        **options: Any,
    ) -> ModelConfig:
        """Build the config of the target or, with `is_draft_model`, of its draft layer.

        A token's KV entry is its latent vector; the value cache holds the indexer's keys, one per pool of tokens, so
        that its head is `index_head_dim / index_kpool` wide. States are declared as stock LMDeploy would keep them.

        Raises:
            ValueError: the checkpoint or the options ask for what this model does not do; the message names it.
        """
        text = hf_config.text_config
        _check(text, tp, spec_method)
        quantization = getattr(hf_config, 'quantization_config', None)
        if quantization is not None and getattr(text, 'quantization_config', None) is None:
            # Layers are built from the text config alone.
            text.quantization_config = quantization
        attention_layers = text.layer_types.count('indexed_attention')
        config = ModelConfig(
            hidden_size=text.hidden_size,
            num_layers=text.num_nextn_predict_layers if is_draft_model else attention_layers,
            num_attention_heads=text.num_attention_heads,
            # Every rank holds the one latent head.
            num_key_value_heads=AutoModelConfigBuilder.update_num_kv_heads(hf_config, tp, 1),
            bos_token_id=text.bos_token_id,
            eos_token_id=text.eos_token_id,
            head_dim=text.kv_lora_rank,
            k_head_dim=text.kv_lora_rank,
            v_head_dim=text.index_head_dim // text.index_kpool,
            vocab_size=text.vocab_size,
            model_paradigm='ar' if spec_method is None else 'ar_spec',
            hf_config=hf_config,
            llm_config=hf_config,
        )
        if is_draft_model:
            hf_config.architectures = [DRAFT_ARCHITECTURE]
        else:
            config.states_shapes = _states(text, tp, num_spec_tokens)
            config.is_gated_delta = True
        return config


def _states(text: Any, tp: int, num_drafts: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    layers, heads, dim = text.layer_types.count('linear_attention'), text.linear_num_heads // tp, text.linear_head_dim
    snapshots = (1 + num_drafts,) if num_drafts else ()
    conv = (layers, 3 * heads * dim, text.linear_conv_kernel_dim + num_drafts)
    return [(conv, torch.bfloat16), ((layers, *snapshots, heads, dim, dim), torch.float32)]


def _check(text: Any, tp: int, spec_method: str | None) -> None:
    for name in ('linear_num_heads', 'num_attention_heads'):
        if getattr(text, name) % tp:
            raise ValueError(f'tp: expected a divisor of {name}={getattr(text, name)}, got {tp}')
    if spec_method not in (None, SPECULATIVE_METHOD):
        raise ValueError(f'speculative method: expected {SPECULATIVE_METHOD!r} for {MODEL_TYPE}, got {spec_method!r}')
    if spec_method is not None and getattr(text, 'num_nextn_predict_layers', 0) != 1:
        layers = getattr(text, 'num_nextn_predict_layers', 0)
        raise ValueError(f'num_nextn_predict_layers: expected 1 for speculative decoding, got {layers}')
    if text.index_head_dim % text.index_kpool:
        raise ValueError(f'index_head_dim: expected a multiple of index_kpool={text.index_kpool}')
    if 'shared' in text.indexer_types:
        raise ValueError("indexer_types: expected 'full' in every layer, got 'shared' in some")
    if not text.index_kpool_always_select_tail:
        raise ValueError('index_kpool_always_select_tail: expected true, got false')
