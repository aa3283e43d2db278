"""Manifold-constrained hyper-connections (mHC): several residual streams, mixed by a doubly stochastic matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from replayssm.models.glm5_next import triton_hyper


class HyperConnection(nn.Module):
    """How one block reads from the streams and writes to them, on a GPU by `triton_hyper`."""

    def __init__(self, config: Any, device: torch.device) -> None:
        super().__init__()
        self.iterations, self.eps, self.norm_eps = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        streams = config.hc_mult
        rows = (2 + streams) * streams

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device), requires_grad=False)

        self.fn, self.base, self.scale = weight(rows, streams * config.hidden_size), weight(rows), weight(3)

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The block's input [..., hidden] from `streams` [..., S, hidden], and the factors that `write` takes."""
        operator = triton_hyper.read if streams.is_cuda else read
        return operator(streams, self.fn, self.base, self.scale, self.iterations, self.eps, self.norm_eps)

    @staticmethod
    def write(output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """The streams after a block that returned `output` [..., hidden]."""
        operator = triton_hyper.write if streams.is_cuda else write
        return operator(output, streams, post, comb)


def read(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `HyperConnection.read`, whose parameters `fn`, `base` and `scale` are; float32 up to the mixing."""
    n = streams.size(-2)
    flat = streams.flatten(-2).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    sizes = [n, n, n * n]
    mixed, bases = F.linear(flat, fn).split(sizes, -1), base.split(sizes)
    pre, post, comb = (w * scale[i] + bases[i] for i, w in enumerate(mixed))
    pre, post = pre.sigmoid() + eps, 2 * post.sigmoid()
    comb = comb.unflatten(-1, (n, n)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    collapsed = (pre[..., None] * streams).sum(-2).to(streams.dtype)
    return collapsed, post.to(streams.dtype), comb.to(streams.dtype)


def write(output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """See `HyperConnection.write`."""
    return post[..., None] * output[..., None, :] + comb.mT @ streams
