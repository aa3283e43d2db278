"""GLM-5.3-Flash's draft layer without a cache: every draft is computed from all tokens and hidden states before it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import Glm5NextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer, Glm5NextTextMoE

PREFIX = 'model.language_model.'


class DraftReference:
    """The draft layer of the checkpoint in `folder`, float32; indexer and experts are transformers' modules."""

    def __init__(self, folder: Path) -> None:
        self.config = Glm5NextConfig.from_pretrained(folder).text_config
        self.config._experts_implementation = 'eager'
        weights = load_file(folder / 'model.safetensors')
        self.embeddings, self.head = weights[f'{PREFIX}embed_tokens.weight'], weights['lm_head.weight']
        prefix = f'{PREFIX}layers.{self.config.num_hidden_layers}.'
        self.weights = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        self.indexer = Glm5NextTextIndexer(self.config, 3)
        self.indexer.load_state_dict(self._below('self_attn.indexer.'))
        self.moe = Glm5NextTextMoE(self.config).eval()
        self.moe.load_state_dict(self._experts())

    def _below(self, prefix: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(prefix): value for key, value in self.weights.items() if key.startswith(prefix)}

    def _experts(self) -> dict[str, torch.Tensor]:
        """Experts are stored one by one and computed all in one."""
        mlp, count = self._below('mlp.'), self.config.n_routed_experts
        gate, up, down = (
            torch.stack([mlp[f'experts.{i}.{kind}_proj.weight'] for i in range(count)])
            for kind in ('gate', 'up', 'down')
        )
        whole = {key: value for key, value in mlp.items() if not key.startswith('experts.')}
        return whole | {'experts.gate_up_proj': torch.cat([gate, up], 1), 'experts.down_proj': down}

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f'{name}.weight'], self.config.rms_norm_eps)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f'{name}.weight'])

    def last(self, tokens: torch.Tensor, hidden: torch.Tensor, anchor: int) -> torch.Tensor:
        """The normalised hidden state of the last token, which attends to what the token at `anchor` has chosen.

        Args:
            tokens: [T], hidden: [T, hidden], what the model made of the token before each.
        """
        pair = torch.cat([self.norm(self.embeddings[tokens], 'enorm'), self.norm(hidden, 'hnorm')], -1)
        x = self.linear(pair, 'eh_proj')
        h = self.norm(x, 'input_layernorm')
        q_latent = self.norm(self.linear(h, 'self_attn.q_a_proj'), 'self_attn.q_a_layernorm')
        latent = self.norm(self.linear(h, 'self_attn.kv_a_proj_with_mqa'), 'self_attn.kv_a_layernorm')
        sizes = [self.config.qk_nope_head_dim, self.config.v_head_dim]
        heads = (self.config.num_attention_heads, -1)
        key, value = self.linear(latent, 'self_attn.kv_b_proj').unflatten(-1, heads).split(sizes, -1)
        query = self.linear(q_latent[-1], 'self_attn.q_b_proj').unflatten(-1, heads)
        present = torch.ones(1, anchor + 1, dtype=torch.bool)
        chosen = self.indexer(h[None, : anchor + 1], q_latent[None, : anchor + 1], present, None)[0, -1]
        chosen = chosen[chosen >= 0].long()
        scores = torch.einsum('hd,nhd->hn', query, key[chosen]) * sizes[0] ** -0.5
        attended = torch.einsum('hn,nhd->hd', scores.softmax(-1), value[chosen]).flatten()
        out = x[-1] + self.linear(attended, 'self_attn.o_proj')
        out = out + self.moe(self.norm(out, 'post_attention_layernorm')[None, None])[0, 0]
        return self.norm(out, 'shared_head.norm')

    @torch.no_grad()
    def drafts(
        self, tokens: torch.Tensor, hidden: torch.Tensor, count: int, is_shared: bool
    ) -> tuple[list[int], float]:
        """`count` greedy drafts behind `tokens`, and the least margin between a draft and the token next to it."""
        anchor, found, margin = tokens.numel() - 1, [], float('inf')
        for _ in range(count):
            state = self.last(tokens, hidden, anchor if is_shared else tokens.numel() - 1)
            best = F.linear(state, self.head).topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            found.append(int(best.indices[0]))
            tokens, hidden = torch.cat([tokens, best.indices[:1]]), torch.cat([hidden, state[None]])
        return found, margin
