"""The multi-token predictor: one attention and mixture-of-experts layer that drafts from the target's hidden states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lmdeploy.pytorch.models.patch import add_prefix
from lmdeploy.pytorch.models.utils.model import DeployModelMixin
from lmdeploy.pytorch.nn import RMSNorm
from lmdeploy.pytorch.nn.linear import build_colwise_linear
from torch import nn

from replayssm.models.glm5_next import weights as checkpoint
from replayssm.models.glm5_next.attention import SparseLatentAttention
from replayssm.models.glm5_next.graphs import DecodeGraphs, declare_step_metadata, table_width
from replayssm.models.glm5_next.indexer import SharedSelection
from replayssm.models.glm5_next.mlp import MixtureOfExperts
from replayssm.models.glm5_next.paging import build_paging


class Glm5NextDraftModel(nn.Module, DeployModelMixin, DecodeGraphs):
    """The checkpoint's layer behind the last; an ordinary residual stream, no hyper-connections.

    Embedding and output head are the target's, and so is the pool that holds this layer's tail ring.
    """

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
        self.config, self.ctx_mgr, self.dtype = config, ctx_mgr, dtype
        declare_step_metadata()
        text = config.text_config
        hidden, self.layer_idx = text.hidden_size, text.num_hidden_layers
        prefix = add_prefix(f'model.language_model.layers.{self.layer_idx}', prefix)

        def norm() -> RMSNorm:
            return RMSNorm(hidden, text.rms_norm_eps, dtype=dtype, device=device)

        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = build_colwise_linear(2 * hidden, hidden, bias=False, dtype=dtype, device=device, is_tp=False)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = SparseLatentAttention(text, dtype, device, add_prefix('self_attn', prefix))
        self.mlp = MixtureOfExperts(text, self.layer_idx, dtype, device, add_prefix('mlp', prefix))
        self.shared_head = nn.ModuleDict({'norm': norm()})
        self._target: list[Any] = []
        self.uses_dsa_topk_buffer = bool(getattr(text, 'index_share_for_mtp_iteration', False))
        """Whether later draft steps reuse the first one's choice of tokens; LMDeploy's proposer knows the name."""
        self._selection = SharedSelection(self.self_attn.indexer.width)

    def bind(self, target: Any) -> None:
        """Draft for `target`; kept out of this module's tree, so that its weights stay the target's."""
        self._target = [target]

    def get_input_embeddings(self) -> nn.Module:
        return self._target[0].get_input_embeddings()

    def compact_topk_indices(self, tokens: torch.Tensor) -> None:
        """Have the later draft steps reuse what the first one chose for `tokens` [N], each sequence's last accepted."""
        self._selection.keep(tokens)

    def forward(
        self,
        input_ids: torch.Tensor,
        target_hidden_states: torch.Tensor,
        past_key_values: list[list[torch.Tensor]],
        attn_metadata: Any,
        state_ids: torch.Tensor,
        skip_topk: bool = False,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Hidden states [1, T, hidden] before the final norm, from tokens [1, T] and what the target made of those
        before them."""
        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(target_hidden_states)], -1))
        latents, pools = past_key_values[0][:2]
        tail = self._target[0].index_tails[:, -1]
        paging = build_paging(attn_metadata, state_ids, x.size(1), latents.size(1))
        shared = self._selection if self.uses_dsa_topk_buffer else None
        x = x + self.self_attn(self.input_layernorm(x), latents, pools, tail, paging, shared, skip_topk)
        return x + self.mlp(self.post_attention_layernorm(x))

    def prepare_hidden_states_for_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        """The final norm: what the target's head reads, and what the next draft step continues from."""
        return self.shared_head['norm'](hidden_states)

    def make_buffers_cudagraph(self, graph_meta: Any, **inputs: Any) -> dict[str, torch.Tensor]:
        """Make the stock buffers, and those of hidden states and slots, which stock graphs of draft layers lack."""
        buffers = super().make_buffers_cudagraph(graph_meta, **inputs)
        shape = (1, graph_meta.max_tokens, self.config.text_config.hidden_size)
        buffers['target_hidden_states'] = torch.zeros(shape, dtype=self.dtype, device=graph_meta.device)
        buffers['state_ids'] = torch.full((graph_meta.max_batchs,), -1, dtype=torch.int64, device=graph_meta.device)
        return buffers

    def fill_buffers_cudagraph(self, graph_meta: Any, **inputs: Any) -> dict[str, Any]:
        """Fill the buffers, which are mutated in place, and return `forward`'s arguments."""
        filled: dict[str, Any] = super().fill_buffers_cudagraph(graph_meta, **inputs)
        hidden, slots = inputs['target_hidden_states'], inputs['state_ids']
        buffers = graph_meta.input_buffers
        buffers['target_hidden_states'][:, : hidden.size(1)].copy_(hidden)
        buffers['state_ids'].fill_(-1)
        buffers['state_ids'][: slots.size(0)].copy_(slots)
        return filled | {name: buffers[name] for name in ('target_hidden_states', 'state_ids')}

    def prepare_inputs_for_generation(
        self,
        past_key_values: list[list[torch.Tensor]],
        inputs_embeds: torch.Tensor | None = None,
        context: Any = None,
    ) -> dict[str, Any]:
        """Inputs of `forward` from LMDeploy's step context; its warm-up runs without state slots."""
        slots, metadata = context.state_offsets, context.attn_metadata
        num_tokens, batch = context.input_ids.size(1), metadata.q_seqlens.size(0)
        limits, drafts = context.cache_config, self.ctx_mgr.build_ctx.num_spec_tokens
        capacity = max(limits.max_prefill_token_num, limits.max_batches * (1 + drafts))
        self._selection.begin(num_tokens, capacity, context.input_ids.device)
        return {
            'input_ids': context.input_ids,
            'position_ids': context.position_ids,
            'target_hidden_states': context.target_hidden_states,
            'past_key_values': past_key_values,
            'attn_metadata': metadata,
            'state_ids': torch.full_like(context.q_seqlens, -1) if slots is None else slots,
            'skip_topk': self._is_later_step(context, num_tokens == batch),
            'table_pages': table_width(metadata.block_offsets.size(1), past_key_values[0][0].size(1)),
            'inputs_embeds': inputs_embeds,
        }

    def _is_later_step(self, context: Any, has_single_tokens: bool) -> bool:
        """Whether a step reuses the choice of the first one. The proposer marks every sequence of such a step, but for
        LMDeploy's warm-up: there it is a decode step of single tokens."""
        if not self.uses_dsa_topk_buffer:
            return False
        if context.is_dummy and not context.model_metas:
            return bool(context.is_decoding and has_single_tokens)
        metas = context.model_metas
        return bool(metas) and all(meta is not None and meta.get('skip_topk', False) for meta in metas)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the predictor's layer; see `weights.load`."""
        prefix = f'model.language_model.layers.{self.layer_idx}.'
        checkpoint.load(self, weights, lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None)
