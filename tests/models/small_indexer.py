"""An indexer of GLM-5.3-Flash outside of an engine, and steps for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import Glm5NextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from replayssm.models.glm5_next.attention import attend_gathered
from replayssm.models.glm5_next.indexer import Indexer
from replayssm.models.glm5_next.paging import Paging

POOL, DIM, HEADS, HIDDEN, RANK = 4, 16, 16, 24, 20
TOP_POOLS = 3
BLOCK = 8
DRAFTS, SCALE = 3, 0.3
ROWS = POOL + DRAFTS


def config(**changes: Any) -> Any:
    text = {
        'hidden_size': HIDDEN,
        'q_lora_rank': RANK,
        'index_n_heads': HEADS,
        'index_head_dim': DIM,
        'index_kpool': POOL,
        'index_topk': TOP_POOLS * POOL,
        'num_hidden_layers': 4,
        'num_nextn_predict_layers': 1,
        **changes,
    }
    return Glm5NextConfig(text_config=text)


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def local_indexer() -> tuple[Indexer, nn.Module]:
    """Our indexer, built outside an engine, and transformers', with the same weights."""
    text = config().text_config
    theirs = randomised(Glm5NextTextIndexer(text, 3))
    ours = Indexer.__new__(Indexer)
    nn.Module.__init__(ours)
    ours.heads, ours.dim, ours.pool, ours.top_pools = HEADS, DIM, POOL, TOP_POOLS
    for name in ('wq_b', 'wk', 'k_norm', 'weights_proj', 'index_kpool_compress_ape', 'index_kpool_compress_gate'):
        setattr(ours, name, getattr(theirs, name))
    return ours, theirs


def step(history: list[int], length: int, is_decoding: bool, blocks: torch.Tensor | None = None) -> Any:
    """LMDeploy's metadata of a step of `length` tokens behind each of `history`."""
    before = torch.tensor(history)
    return SimpleNamespace(
        is_decoding=is_decoding,
        q_seqlens=torch.full_like(before, length),
        kv_seqlens=before + length,
        block_offsets=torch.tensor([[5, 2, 7, 1, 3, 6, 4]]) if blocks is None else blocks,
    )


class Caches:
    """What two sequences and the reserved slot hold; page 0 is the first sequence's."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.latents = torch.randn(9, BLOCK, RANK)
        self.pools = torch.randn(9, BLOCK // POOL, DIM)
        self.tail = torch.randn(3, ROWS, 2, DIM)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.latents, self.pools, self.tail


def decode(indexer: Indexer, caches: Caches, paging: Paging, x: torch.Tensor, q_latent: torch.Tensor) -> torch.Tensor:
    """The parts of the attention layer that read and write caches."""
    latent, source = x[:, :RANK], paging.source
    caches.latents[paging.block[source], paging.offset[source]] = latent[source]
    indexer.write(x, caches.pools, caches.tail, paging)
    (group,) = paging.groups
    shape = group.position.shape
    selected = indexer.select(q_latent.unflatten(0, shape), x.unflatten(0, shape), caches.pools, group)
    query = q_latent[:, None].expand(-1, 2, -1).unflatten(0, shape)
    return attend_gathered(query, selected, caches.latents, group, SCALE).flatten(0, 1)
