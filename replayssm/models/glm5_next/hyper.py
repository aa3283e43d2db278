"""Manifold-constrained hyper-connections (mHC): several residual streams, mixed by a doubly stochastic matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class HyperConnection(nn.Module):
    """How one block reads from the streams and writes to them. Everything up to the mixing is float32."""

    def __init__(self, config: Any, device: torch.device) -> None:
        super().__init__()
        self.streams, self.iterations = config.hc_mult, config.hc_sinkhorn_iters
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        rows = (2 + self.streams) * self.streams

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device), requires_grad=False)

        self.fn, self.base, self.scale = weight(rows, self.streams * config.hidden_size), weight(rows), weight(3)

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The block's input [..., hidden] from `streams` [..., S, hidden], and the factors that `write` takes."""
        n = self.streams
        flat = streams.flatten(-2).float()
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        sizes = [n, n, n * n]
        mixed, base = F.linear(flat, self.fn).split(sizes, -1), self.base.split(sizes)
        pre, post, comb = (w * self.scale[i] + base[i] for i, w in enumerate(mixed))
        pre, post = pre.sigmoid() + self.eps, 2 * post.sigmoid()
        comb = comb.unflatten(-1, (n, n)).softmax(-1) + self.eps
        comb = comb / (comb.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + self.eps)
            comb = comb / (comb.sum(-2, keepdim=True) + self.eps)
        collapsed = (pre[..., None] * streams).sum(-2).to(streams.dtype)
        return collapsed, post.to(streams.dtype), comb.to(streams.dtype)

    @staticmethod
    def write(output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """The streams after a block that returned `output` [..., hidden]."""
        return post[..., None] * output[..., None, :] + comb.mT @ streams
