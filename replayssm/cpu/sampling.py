"""Sampling with seeds, which LMDeploy's portable operator ignores."""

from __future__ import annotations

import random

import torch
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingImpl


class CpuMultinomialSamplingImpl(MultinomialSamplingImpl):
    """One draw per row, the same for the same seed and offset whatever else is in the batch."""

    def forward(
        self,
        scores: torch.Tensor,
        seeds: torch.Tensor,
        offsets: torch.Tensor,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `[N]` token ids.

        Args:
            scores: `[N, C]`, probabilities of the candidates; they need not sum to 1.
            seeds, offsets: `[N]`, a request's seed and the position of the draw.
            indices: `[N, C]` token ids of the candidates; `None` when a candidate is its token.
        """
        keys = zip(seeds.tolist(), offsets.tolist(), strict=True)
        draws = [random.Random(f'{seed}:{offset}').random() for seed, offset in keys]
        cumulative = scores.double().cumsum(-1)
        target = torch.tensor(draws, dtype=torch.float64)[:, None] * cumulative[:, -1:]
        choice = torch.searchsorted(cumulative, target, right=True).clamp_max(scores.size(-1) - 1)
        return (choice if indices is None else indices.gather(1, choice)).view(-1)
