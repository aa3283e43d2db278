"""Attention of a window of drafts with and without FlashAttention-3, on one GPU: microseconds of a layer's launch.

    python -m tests.bench.bench_window_attention

The shape is Qwen3.5-35B-A3B's. `triton` is what runs where FA3 is not installed, `fa3` what runs where it is, `single`
one token in place of the window. Figures are medians of CUDA graph replays, beside the floor of reading the cached keys
and values once. The outputs of both ways are compared first.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from replayssm.patching import Patches
from tests.bench.kernel_bench import copy_bytes_per_us, median_us

HEADS, KV_HEADS, SIZE, BLOCK = 16, 2, 256, 64
LAYERS = 4
CASES = [(tokens, batch, length) for tokens in (2, 4, 8) for batch in (8, 64) for length in (1024, 8192)]


def cache_bytes(batch: int, length: int) -> int:
    """Bytes of one layer's cached keys and values, bf16."""
    return 2 * batch * length * KV_HEADS * SIZE * 2


class Attention:
    """One layer after the other over caches of its own, so that nothing stays in the L2."""

    def __init__(self, kind: type[Any], tokens: int, batch: int, length: int) -> None:
        from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionMetadata

        pages = -(-length // BLOCK)
        generator = torch.Generator('cuda').manual_seed(0)
        options = {'device': 'cuda', 'dtype': torch.bfloat16, 'generator': generator}
        self.states = [torch.randn(2, batch * pages, BLOCK, KV_HEADS, SIZE, **options) for _ in range(LAYERS)]
        self.query = torch.randn(batch * tokens, HEADS, SIZE, **options)
        table = torch.randperm(batch * pages, device='cuda', generator=generator).view(batch, pages).int()
        self.metadata = TritonAttentionMetadata(
            is_decoding=True,
            block_offsets=table,
            q_seqlens=torch.full((batch,), tokens, device='cuda'),
            kv_seqlens=torch.full((batch,), length, device='cuda'),
            max_q_seqlen=tokens,
        )
        self.attention = kind(HEADS, SIZE, num_kv_heads=KV_HEADS)
        self.out = self.query

    def __call__(self) -> None:
        for keys, values in self.states:
            self.out = self.attention.forward(self.query, None, None, keys, values, self.metadata)


def measure(tokens: int, batch: int, length: int) -> dict[str, float]:
    """Return microseconds by contender.

    Raises:
        AssertionError: the two ways differ.
    """
    from lmdeploy.pytorch.backends.cuda.attention import use_fa3
    from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionImpl

    us, outputs = {}, {}
    kinds: dict[str, tuple[type[Any], int]] = {
        'single': (TritonAttentionImpl, 1),
        'triton': (TritonAttentionImpl, tokens),
    }
    if use_fa3:
        from lmdeploy.pytorch.backends.cuda.attention.fa3 import FA3Impl

        kinds['fa3'] = (FA3Impl, tokens)
    for name, (kind, window) in kinds.items():
        contender = Attention(kind, window, batch, length)
        us[name] = median_us(contender)
        outputs[name] = contender.out.reshape(batch, window, HEADS, SIZE)
    if use_fa3:
        torch.testing.assert_close(outputs['triton'], outputs['fa3'], rtol=2e-2, atol=2e-2)
    return us


def main() -> None:
    from replayssm.patch import window_attention

    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    bandwidth = copy_bytes_per_us()
    print(f'{torch.cuda.get_device_name()}: device copy {bandwidth / 1e6:.2f} TB/s')
    patches = Patches()
    window_attention.install(patches)
    try:
        for tokens, batch, length in CASES:
            us = measure(tokens, batch, length)
            # A copy reads and writes; here all is read.
            words = [f'T={tokens} B={batch:<2} {length:>5} cached: floor {cache_bytes(batch, length) / bandwidth:.1f}']
            words += [f'{name} {value:.1f}' for name, value in us.items()]
            if 'fa3' in us:
                words.append(f'triton/fa3 {us["triton"] / us["fa3"]:.2f}')
            print(' '.join(words), flush=True)
    finally:
        patches.undo()


if __name__ == '__main__':
    main()
