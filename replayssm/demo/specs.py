"""The demo models with random weights, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

VOCAB_SIZE = 320
"""256 bytes, the special tokens, and a rest that is never used, so that 2 and 4 ranks can share the rows."""


@dataclass(frozen=True, slots=True)
class DemoSpec:
    """Shape and character of one demo model: blocks of three gated-delta layers and one full-attention layer.

    Attributes:
        summary: what the model is for, in one line.
        key_heads, value_heads, key_head_dim, value_head_dim: H, HV, K and V of the gated-delta layers.
        attention_heads, kv_heads, attention_head_dim: of the full-attention layers.
        num_experts: 0 makes the feed-forward layers dense.
        vocab_size: rows of the embedding, at least as many as the tokenizer has tokens.
        layer_gain: scale of every layer's output. Below one the next token depends mostly on the current token, so
            that a draft layer without training can guess it part of the time.
        draft_follows_target: whether the draft layer imitates the target; otherwise its weights are random and its
            drafts are almost always rejected.
        seed: of every weight.
    """

    summary: str
    hidden_size: int = 128
    intermediate_size: int = 256
    num_blocks: int = 1
    key_heads: int = 2
    value_heads: int = 4
    key_head_dim: int = 32
    value_head_dim: int = 32
    attention_heads: int = 4
    kv_heads: int = 2
    attention_head_dim: int = 64
    num_experts: int = 0
    vocab_size: int = VOCAB_SIZE
    layer_gain: float = 1.0
    draft_follows_target: bool = False
    seed: int = 0

    @property
    def num_layers(self) -> int:
        """Decoder layers without the draft layer."""
        return 4 * self.num_blocks


@dataclass(frozen=True, slots=True)
class Glm5NextSpec:
    """Shape and character of one demo model of the GLM-5.3-Flash architecture; every fourth layer is attention.

    Attributes:
        summary: what the model is for, in one line.
        linear_heads, linear_head_dim: of the Kimi Delta Attention layers.
        attention_heads, q_rank, kv_rank, key_dim, value_dim: of the sparse latent attention layers.
        index_heads, index_dim, index_top_tokens: of their indexers; the last is what a query attends to at most.
        expert_size, num_experts: of the feed-forward layers behind the first, which is dense.
        swiglu_limit: low enough to clamp.
        layer_gain, draft_follows_target, seed: as in `DemoSpec`.
    """

    summary: str
    hidden_size: int = 96
    num_layers: int = 5
    intermediate_size: int = 128
    linear_heads: int = 4
    linear_head_dim: int = 32
    attention_heads: int = 4
    q_rank: int = 48
    kv_rank: int = 64
    key_dim: int = 24
    value_dim: int = 40
    index_heads: int = 16
    index_dim: int = 16
    index_top_tokens: int = 16
    expert_size: int = 32
    num_experts: int = 8
    swiglu_limit: float = 1.0
    layer_gain: float = 1.0
    draft_follows_target: bool = False
    seed: int = 0

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The target's layers by kind."""
        return tuple('indexed_attention' if i % 4 == 3 else 'linear_attention' for i in range(self.num_layers))


SPECS: Mapping[str, DemoSpec | Glm5NextSpec] = MappingProxyType(
    {
        'tiny': DemoSpec('1 M parameters; its drafts are partly right', layer_gain=0.15, draft_follows_target=True),
        'odd': DemoSpec(
            'no two sizes alike: K != V, H != HV, drafts wrong',
            key_heads=2,
            value_heads=6,
            key_head_dim=16,
            value_head_dim=48,
            seed=1,
        ),
        'tp4': DemoSpec(
            'every head count divides by 4; its drafts are partly right',
            key_heads=4,
            value_heads=8,
            kv_heads=4,
            attention_head_dim=32,
            layer_gain=0.15,
            draft_follows_target=True,
            seed=2,
        ),
        'moe': DemoSpec('sparse feed-forward layers: 2 of 8 experts', intermediate_size=64, num_experts=8, seed=3),
        'glm': Glm5NextSpec(
            'all layer types of GLM-5.3-Flash, two attention layers; its drafts are partly right',
            num_layers=8,
            layer_gain=0.15,
            draft_follows_target=True,
            seed=4,
        ),
        'glm_odd': Glm5NextSpec('GLM-5.3-Flash in sizes that are no powers of two; drafts wrong', seed=5),
    }
)
