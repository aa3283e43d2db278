"""The model in training: transformers' own Qwen3.5, and its draft layer, which transformers lacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

NUM_DRAFTS = 3


@dataclass(frozen=True, slots=True)
class Losses:
    """What one batch is trained on, and what is shown of it.

    Attributes:
        target: mean cross-entropy of the next token in nats, a scalar with a gradient for the target's weights.
        drafts: mean cross-entropy of every draft against the target's distribution, [NUM_DRAFTS], with gradients for
            the draft layer's weights alone.
        agreement: share of drafts that are the target's first choice, [NUM_DRAFTS].
    """

    target: torch.Tensor
    drafts: torch.Tensor
    agreement: torch.Tensor


class DraftLayer(nn.Module):
    """Qwen3.5's multi-token prediction layer, under the weight names of published checkpoints behind `mtp.`."""

    def __init__(self, config: Any) -> None:
        """Make the layer from the target's text config."""
        super().__init__()
        config = type(config)(**config.to_dict() | {'num_hidden_layers': 1, 'layer_types': ['full_attention']})
        # Masks of several steps are dense.
        config._attn_implementation = 'sdpa'
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, 0)])
        self.norm = Qwen3_5RMSNorm(size, eps=eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(self, hidden: torch.Tensor, embeddings: torch.Tensor, rotary: Any) -> list[torch.Tensor]:
        """Return the hidden states of every draft, as decoding computes them when all drafts before were right.

        Draft `k` (from 1) of position t reads token t + k and the state that draft `k - 1` left at t, at first the
        target's. It attends to the keys of first drafts up to t, made from the target's states, and to those of its
        own position's earlier drafts: what the KV cache holds after a verification and `k` steps.

        Args:
            hidden: the target's states after its final norm [B, T, D].
            embeddings: of the tokens [B, T, D].
            rotary: the target's rotary embedding module.

        Returns:
            `NUM_DRAFTS` tensors, the k-th [B, T - k, D].
        """
        cache = DynamicCache()
        masks: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        positions = torch.arange(hidden.size(1), device=hidden.device)
        for step in range(1, NUM_DRAFTS + 1):
            count = hidden.size(1) - 1
            inputs = torch.cat(
                (
                    self.pre_fc_norm_embedding(embeddings[:, step : step + count]),
                    self.pre_fc_norm_hidden(hidden[:, :count]),
                ),
                dim=-1,
            )
            origins = positions[:count]
            seen = origins[:, None] >= origins if step == 1 else origins[:, None] == origins
            masks = [*(mask[:count] for mask in masks), seen]
            slots = (origins + step - 1)[None, None].expand(3, hidden.size(0), -1)
            hidden = self.layers[0](
                self.fc(inputs),
                position_embeddings=rotary(embeddings, slots),
                attention_mask=torch.cat(masks, dim=1)[None, None],
                cache=cache,
            )
            hidden = self.norm(hidden)
            states.append(hidden)
        return states


class Trainee(nn.Module):
    """Target and draft layer together."""

    def __init__(self, folder: Path) -> None:
        """Make both from the config.json in `folder`, with random weights."""
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        self.target = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        # The tower that sees images belongs to the architecture; nothing here trains it.
        self.target.model.visual.requires_grad_(False)
        self.mtp = DraftLayer(config.text_config)

    @classmethod
    def load(cls, folder: Path) -> Trainee:
        """Return the model that was exported into `folder`, in float32.

        Raises:
            RuntimeError: a weight is missing or left over.
        """
        trainee = cls(folder)
        weights = load_file(folder / 'model.safetensors')
        named = {name if name.startswith('mtp.') else f'target.{name}': weight for name, weight in weights.items()}
        trainee.load_state_dict(named)
        return trainee

    def forward(self, tokens: torch.Tensor) -> Losses:
        """Return the losses of a batch of tokens [B, T]."""
        text, head = self.target.model.language_model, self.target.lm_head
        hidden = text(input_ids=tokens, use_cache=False).last_hidden_state
        logits = head(hidden).float()
        target = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        # Drafts learn what the target would say; they share its embedding and head without moving them.
        wanted = logits.detach()
        embeddings = text.embed_tokens(tokens).detach()
        losses, agreement = [], []
        for step, state in enumerate(self.mtp(hidden.detach(), embeddings, text.rotary_emb), 1):
            draft = functional.linear(state, head.weight.detach()).float()
            goal = wanted[:, step:]
            losses.append(functional.cross_entropy(draft.flatten(0, 1), goal.softmax(-1).flatten(0, 1)))
            agreement.append((draft.detach().argmax(-1) == goal.argmax(-1)).float().mean())
        return Losses(target, torch.stack(losses), torch.stack(agreement))

    def published_weights(self) -> dict[str, torch.Tensor]:
        """Return every weight under its name in published checkpoints."""
        draft = {f'mtp.{name}': weight for name, weight in self.mtp.state_dict().items()}
        return {**self.target.state_dict(), **draft}

    @property
    def zero_centred_norms(self) -> set[str]:
        """Published names of the norms that scale by one plus their weight."""
        norms = (name for name, module in self.named_modules() if isinstance(module, Qwen3_5RMSNorm))
        return {f'{name.removeprefix("target.")}.weight' for name in norms}
