"""The target model, as LMDeploy's engine runs it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, cast

import torch
from lmdeploy.pytorch.models.patch import add_prefix
from lmdeploy.pytorch.models.utils.model import DeployModelMixinV1
from lmdeploy.pytorch.nn import ParallelEmbedding, RMSNorm
from lmdeploy.pytorch.nn.gated_delta import GatedDeltaMetaBuilder
from torch import nn

from replayssm.models.glm5_next import weights as checkpoint
from replayssm.models.glm5_next.attention import SparseLatentAttention
from replayssm.models.glm5_next.graphs import DecodeGraphs, declare_step_metadata, table_width
from replayssm.models.glm5_next.hyper import HyperConnection
from replayssm.models.glm5_next.kda import KdaAttention
from replayssm.models.glm5_next.mlp import MixtureOfExperts, Mlp
from replayssm.models.glm5_next.paging import Paging, build_paging

LayerCache = tuple[torch.Tensor, ...]
"""Convolution and recurrent state of a KDA layer; latents, pool keys and tail ring of an attention layer."""


class DecoderLayer(nn.Module):
    """One layer; every block reads from and writes to the residual streams by its own hyper-connection."""

    def __init__(self, config: Any, index: int, dtype: torch.dtype, device: torch.device, prefix: str) -> None:
        super().__init__()
        self.is_linear = config.layer_types[index] == 'linear_attention'
        attention = KdaAttention if self.is_linear else SparseLatentAttention
        self.self_attn = attention(config, dtype, device, add_prefix('self_attn', prefix))
        self.mlp: nn.Module
        if config.mlp_layer_types[index] == 'sparse':
            self.mlp = MixtureOfExperts(config, index, dtype, device, add_prefix('mlp', prefix))
        else:
            self.mlp = Mlp(config, config.intermediate_size, dtype, device, add_prefix('mlp', prefix))
        norm = {'dtype': dtype, 'device': device}
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **norm)
        self.attn_hc, self.ffn_hc = HyperConnection(config, device), HyperConnection(config, device)

    def forward(self, streams: torch.Tensor, cache: LayerCache, meta: Any, paging: Paging) -> torch.Tensor:
        """[1, T, S, hidden] of the same; `cache` is mutated in place."""
        x, post, comb = self.attn_hc.read(streams)
        x = self.input_layernorm(x)
        x = self.self_attn(x, *cache, meta if self.is_linear else paging)
        streams = self.attn_hc.write(x, streams, post, comb)
        x, post, comb = self.ffn_hc.read(streams)
        x = self.mlp(self.post_attention_layernorm(x))
        return self.ffn_hc.write(x, streams, post, comb)


class LanguageModel(nn.Module):
    """Embedding, layers, the mean over the streams, and the final norm."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device, prefix: str) -> None:
        super().__init__()
        self.streams, self.conv_width = config.hc_mult, config.linear_conv_kernel_dim
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size, config.hidden_size, config.pad_token_id, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, dtype, device, add_prefix(f'layers.{i}', prefix))
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.build_meta = GatedDeltaMetaBuilder()

    def forward(
        self,
        input_ids: torch.Tensor,
        caches: list[LayerCache],
        attn_metadata: Any,
        state_ids: torch.Tensor,
        block_size: int,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [1, T, hidden] of tokens [1, T]."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        meta: Any = self.build_meta(x.size(1), self.conv_width, state_ids, attn_metadata)
        paging = build_paging(attn_metadata, state_ids, x.size(1), block_size)
        streams = x[:, :, None].expand(-1, -1, self.streams, -1).contiguous()
        for layer, cache in zip(self.layers, caches, strict=True):
            streams = layer(streams, cache, meta, paging)
        return self.norm(streams.mean(2))


class Glm5NextForConditionalGeneration(nn.Module, DeployModelMixinV1, DecodeGraphs):
    """The text model of a checkpoint; its vision tower is not built."""

    packed_modules_mapping = {'gate_up_proj': ['gate_proj', 'up_proj']}  # noqa: RUF012

    def __init__(
        self,
        config: Any,
        ctx_mgr: Any,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = '',
    ) -> None:
        super().__init__()
        self.config, self.ctx_mgr = config, ctx_mgr
        declare_step_metadata()
        text = config.text_config
        prefix = add_prefix('model.language_model', prefix)
        self.model = nn.ModuleDict({'language_model': LanguageModel(text, dtype, device, prefix)})
        build_head = DeployModelMixinV1.build_lm_head
        self.lm_head = build_head(self, text.hidden_size, text.vocab_size, bias=False, dtype=dtype, device=device)
        self.index_tails: torch.Tensor | None = None
        """Tail rings [N, layers, rows, 2, dim] of the engine that runs this model; the draft layer's is the last."""

    @property
    def language_model(self) -> LanguageModel:
        return cast(LanguageModel, self.model['language_model'])

    def forward(
        self,
        input_ids: torch.Tensor,
        past_key_values: list[LayerCache],
        attn_metadata: Any,
        state_ids: torch.Tensor,
        block_size: int,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        """Hidden states after the final norm; LMDeploy's engine reads logits from them, the draft layer continues."""
        caches = (past_key_values, attn_metadata, state_ids, block_size)
        return {'hidden_states': self.language_model(input_ids, *caches, inputs_embeds)}

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.embed_tokens

    def prepare_inputs_for_generation(
        self,
        past_key_values: list[list[torch.Tensor]],
        inputs_embeds: torch.Tensor | None = None,
        context: Any = None,
    ) -> dict[str, Any]:
        """Inputs of `forward` from LMDeploy's step context.

        Raises:
            ValueError: the step holds images.
        """
        if context.input_multimodals is not None and any(context.input_multimodals):
            raise ValueError('images: glm5_next takes text only, its vision tower is not supported; send no images')
        layout, replay = context.model_config.state_layout, context.model_config.replay
        kinds = [tensor.kind for tensor in (layout.tensors() if replay else layout.stock_tensors())]
        conv, recurrent, tails = (context.state_caches[kinds.index(k)] for k in ('conv', 'checkpoint', 'index'))
        self.index_tails = tails
        paged, linear, attention = list(past_key_values), 0, 0
        caches: list[LayerCache] = []
        for layer_type in self.config.text_config.layer_types:
            if layer_type == 'linear_attention':
                caches.append((conv[:, linear], recurrent[:, linear]))
                linear += 1
            else:
                caches.append((*paged[attention][:2], tails[:, attention]))
                attention += 1
        block_size = paged[0][0].size(1)
        return {
            'input_ids': context.input_ids,
            'position_ids': context.position_ids,
            'past_key_values': caches,
            'attn_metadata': context.attn_metadata,
            'state_ids': context.state_offsets,
            'block_size': block_size,
            'table_pages': table_width(context.attn_metadata.block_offsets.size(1), block_size),
            'inputs_embeds': inputs_embeds,
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the text model; see `weights.load`."""
        layers = self.config.text_config.num_hidden_layers

        def own_name(name: str) -> str | None:
            if not name.startswith(('model.language_model.', 'lm_head.')):
                return None
            layer = re.match(r'model\.language_model\.layers\.(\d+)\.', name)
            return None if layer is not None and int(layer[1]) >= layers else name

        checkpoint.load(self, weights, own_name)
