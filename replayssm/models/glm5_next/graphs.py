"""What LMDeploy's CUDA graphs and its metadata of a step need to know of this model.

LMDeploy gives a graph a page table as wide as all of the KV cache, and this model's indexer scores all of the table.
Its graphs therefore come in several widths: the key of a graph holds the next one above the step's own table.
"""

from __future__ import annotations

from typing import Any

import torch
from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionMetaBuilder
from lmdeploy.pytorch.backends.cuda.step_metadata import register_step_metadata_impl
from lmdeploy.pytorch.models.utils.cudagraph import CudaGraphMixin

_NARROWEST_TOKENS = 4096
_GROWTH = 4


def table_width(pages: int, block_size: int) -> int:
    """Pages of the narrowest graph for page tables of `pages` columns."""
    width = -(-_NARROWEST_TOKENS // block_size)
    while width < pages:
        width *= _GROWTH
    return width


class DecodeGraphs(CudaGraphMixin):
    """Stock graphs of decode steps, one per width of the page table; `forward` takes and ignores `table_pages`."""

    def get_cudagraph_extra_key(self, table_pages: int, skip_topk: bool = False, **_: Any) -> tuple[int, bool]:
        """Tell graphs apart by their table, and by whether they choose tokens or reuse a choice."""
        return table_pages, skip_topk

    def make_buffers_cudagraph(self, graph_meta: Any, *, table_pages: int, **inputs: Any) -> dict[str, torch.Tensor]:
        """Make the stock buffers, with a page table of `table_pages` columns."""
        graph_meta.num_blocks = table_pages
        buffers: dict[str, torch.Tensor] = super().make_buffers_cudagraph(graph_meta, **inputs)
        return buffers


class _SharedMetadataOnly:
    """What LMDeploy takes for an attention operator that needs nothing but page table and lengths.

    Without one it would fall back to metadata for FlashAttention-3, which knows no heads of 512.
    """

    def get_step_metadata_provider(self) -> TritonAttentionMetaBuilder:
        return TritonAttentionMetaBuilder()

    def bind_step_meta_group(self, group: int) -> None:
        pass


def declare_step_metadata() -> None:
    """Say, while a model is built, what its steps need; ignored on a CPU."""
    register_step_metadata_impl(_SharedMetadataOnly())
