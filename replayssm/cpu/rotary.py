"""Rotary position embedding."""

from __future__ import annotations

import torch
from lmdeploy.pytorch.backends.apply_rotary_emb import ApplyRotaryEmbImpl


class CpuApplyRotaryEmbImpl(ApplyRotaryEmbImpl):
    """Rotates the first `rope_dim` channels of every head, so partial rotary works too."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inplace: bool = True,
        complex_mode: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate `query` and `key`, `[tokens, heads, head_dim]`, by `cos` and `sin`, `[tokens, rope_dim]`.

        Both are mutated in place when `inplace`.
        """
        if complex_mode:
            raise NotImplementedError("device type 'cpu' has no rotary embedding of adjacent pairs")
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        if not inplace:
            query, key = query.clone(), key.clone()
        _rotate(query, cos, sin)
        _rotate(key, cos, sin)
        return query, key


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    rotated = x[..., : cos.size(-1)]
    first, second = rotated.chunk(2, dim=-1)
    half_turn = torch.cat((second.neg(), first), dim=-1)
    rotated.mul_(cos).addcmul_(half_turn, sin)
