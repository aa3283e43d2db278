"""Operators of decode steps on one GPU: microseconds of a layer's launch, medians of CUDA graph replays.

    python -m tests.bench.bench_operators [windows] [latents] [pools] [streams]

`windows`: drafts of Qwen3.5-35B-A3B with FlashAttention-3 and without it, beside a single token's attention.
`latents`: sparse latent attention of GLM-5.3-Flash on one of four GPUs, gathered by PyTorch and fused.
`pools`: choice of those latents by scores of pooled keys, by PyTorch and fused.
`streams`: hyper-connections of GLM-5.3-Flash around one block, by PyTorch and fused.
The floor is moving the cached bytes, or the streams, at the rate of a device copy. What is compared must agree first.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from replayssm.models.glm5_next import hyper, indexer, triton_hyper, triton_indexer
from replayssm.models.glm5_next.attention import attend_gathered
from replayssm.models.glm5_next.paging import Group
from replayssm.patching import Patches
from tests.bench.kernel_bench import copy_bytes_per_us, median_us
from tests.bench.kernel_case import layers_past_l2

BLOCK = 64
HEADS, KV_HEADS, SIZE = 16, 2, 256
LATENT_HEADS, RANK, CHOSEN = 16, 512, 2056
HIDDEN, STREAMS = 4096, 4
INDEX_HEADS, INDEX_DIM, POOL = 32, 128, 4


class Layers:
    """One layer after the other: `operator` of each layer's state."""

    def __init__(self, operator: Callable[[torch.Tensor], torch.Tensor], states: list[torch.Tensor]) -> None:
        self._operator = operator
        self.states = states
        self.out = torch.empty(0)

    def __call__(self) -> None:
        for state in self.states:
            self.out = self._operator(state)


def caches(*shape: int) -> list[torch.Tensor]:
    """As many as keep anything from staying in the L2."""
    return [normal(*shape) for _ in range(layers_past_l2(2 * math.prod(shape)))]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device='cuda', dtype=torch.bfloat16)


def page_table(batch: int, pages: int) -> torch.Tensor:
    return torch.randperm(batch * pages, device='cuda').view(batch, pages)


def report(what: str, moved_bytes: int, contenders: dict[str, Layers], bandwidth: float) -> None:
    """Print a line; the first contender's time over every other one's is its speed-up.

    Raises:
        AssertionError: contenders with outputs of one shape differ.
    """
    us = {name: median_us(contender) for name, contender in contenders.items()}
    (first, reference), *others = ((name, comparable(contender.out)) for name, contender in contenders.items())
    for name, out in others:
        if out.numel() == reference.numel():
            assert (out - reference).norm() < 1e-2 * reference.norm(), f'{what}: {name} differs from {first}'
            what = f'{what} {first}/{name} {us[first] / us[name]:.2f}'
    times = ' '.join(f'{name} {value:.1f}' for name, value in us.items())
    print(f'{what}: floor {moved_bytes / bandwidth:.1f} {times}', flush=True)


def comparable(out: torch.Tensor) -> torch.Tensor:
    """An output as one vector; chosen tokens, which come in any order, sorted."""
    return (out if out.is_floating_point() else out.sort(-1).values).flatten().float()


def bench_windows(bandwidth: float) -> None:
    from lmdeploy.pytorch.backends.cuda.attention import use_fa3
    from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionImpl, TritonAttentionMetadata
    from lmdeploy.pytorch.backends.cuda.attention.fa3 import FA3Impl

    from replayssm.patch import window_attention

    def contender(kind: type[Any], tokens: int, table: torch.Tensor, length: int, states: list[torch.Tensor]) -> Layers:
        batch = table.size(0)
        metadata = TritonAttentionMetadata(
            is_decoding=True,
            block_offsets=table.int(),
            q_seqlens=torch.full((batch,), tokens, device='cuda'),
            kv_seqlens=torch.full((batch,), length, device='cuda'),
            max_q_seqlen=tokens,
        )
        torch.manual_seed(1)
        query, attention = normal(batch * tokens, HEADS, SIZE), kind(HEADS, SIZE, num_kv_heads=KV_HEADS)
        return Layers(lambda state: attention.forward(query, None, None, *state, metadata), states)

    patches = Patches()
    window_attention.install(patches)
    try:
        for tokens, batch, length in [(t, b, n) for t in (2, 4, 8) for b in (8, 64) for n in (1024, 8192)]:
            table = page_table(batch, length // BLOCK)
            states = caches(2, table.numel(), BLOCK, KV_HEADS, SIZE)
            contenders = {'triton': contender(TritonAttentionImpl, tokens, table, length, states)}
            if use_fa3:
                contenders['fa3'] = contender(FA3Impl, tokens, table, length, states)
            contenders['single'] = contender(TritonAttentionImpl, 1, table, length, states)
            what = f'windows T={tokens} B={batch} {length} cached'
            report(what, states[0].numel() * states[0].element_size(), contenders, bandwidth)
    finally:
        patches.undo()


def bench_latents(bandwidth: float) -> None:
    from replayssm.models.glm5_next.triton_attention import attend_fused

    length = 2 * CHOSEN // BLOCK * BLOCK
    for tokens, batch in [(t, b) for t in (1, 4) for b in (1, 8, 64, 256) if t * b <= 256]:
        table, position = page_table(batch, length // BLOCK), torch.full((batch, tokens), length - 1, device='cuda')
        group = Group(slice(0, position.numel()), table, position, position[:, -1] + 1, is_prompt=False)
        chosen = torch.rand(batch, tokens, length, device='cuda').topk(CHOSEN).indices.int()
        query = normal(batch, tokens, LATENT_HEADS, RANK)
        states = caches(table.numel(), BLOCK, RANK)
        contenders = {
            name: Layers(partial(_attend, attend, query, chosen, group), states)
            for name, attend in (('gathered', attend_gathered), ('fused', attend_fused))
        }
        report(f'latents T={tokens} B={batch}', batch * tokens * CHOSEN * RANK * 2, contenders, bandwidth)


def _attend(
    attend: Callable[..., torch.Tensor], query: torch.Tensor, chosen: torch.Tensor, group: Group, latents: torch.Tensor
) -> torch.Tensor:
    return attend(query, chosen, latents, group, SIZE**-0.5)


def bench_pools(bandwidth: float) -> None:
    contenders = {'pytorch': indexer.select_tokens, 'fused': triton_indexer.select_tokens}
    for tokens, batch, length in [(t, b, n) for t in (1, 4) for b in (8, 64) for n in (4096, 32768)]:
        table, position = page_table(batch, length // BLOCK), torch.full((batch, tokens), length - 1, device='cuda')
        group = Group(slice(0, position.numel()), table, position, position[:, -1] + 1, is_prompt=False)
        queries = normal(batch, tokens, INDEX_HEADS, INDEX_DIM)
        weights = torch.randn(batch, tokens, INDEX_HEADS, device='cuda')
        states = caches(table.numel(), BLOCK // POOL, INDEX_DIM)
        layers = {name: Layers(partial(_select, s, queries, weights, group), states) for name, s in contenders.items()}
        report(f'pools T={tokens} B={batch} {length} cached', states[0].numel() * 2, layers, bandwidth)


def _select(
    select: Callable[..., torch.Tensor],
    queries: torch.Tensor,
    weights: torch.Tensor,
    group: Group,
    pools: torch.Tensor,
) -> torch.Tensor:
    return select(queries, weights, pools, group, POOL, (CHOSEN - 8) // POOL)


def bench_streams(bandwidth: float) -> None:
    rows = (2 + STREAMS) * STREAMS
    weights = [torch.randn(shape, device='cuda') * 0.02 for shape in ((rows, STREAMS * HIDDEN), (rows,), (3,))]
    contenders = {'pytorch': (hyper.read, hyper.write), 'fused': (triton_hyper.read, triton_hyper.write)}

    def around_block(read: Callable[..., Any], write: Callable[..., Any], streams: torch.Tensor) -> torch.Tensor:
        block, post, comb = read(streams, *weights, 20, 1e-6, 1e-5)
        return cast('torch.Tensor', write(block, streams, post, comb))

    for tokens in (1, 64, 256, 8192):
        states = caches(tokens, STREAMS, HIDDEN)
        layers = {name: Layers(partial(around_block, *pair), states) for name, pair in contenders.items()}
        # Streams are read twice and written once, a block's input is written and its output read.
        report(f'streams T={tokens}', tokens * (3 * STREAMS + 2) * HIDDEN * 2, layers, bandwidth)


BENCHMARKS = {'windows': bench_windows, 'latents': bench_latents, 'pools': bench_pools, 'streams': bench_streams}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', default=list(BENCHMARKS), help=', '.join(BENCHMARKS))
    names = parser.parse_args().names
    bandwidth = copy_bytes_per_us()
    print(f'{torch.cuda.get_device_name()}: device copy {bandwidth / 1e6:.2f} TB/s')
    for name in names:
        BENCHMARKS[name](bandwidth)


if __name__ == '__main__':
    main()
