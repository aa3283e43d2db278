"""Projections of one block, by the name that the checkpoint gives them below the block's prefix."""

from __future__ import annotations

from typing import Any

import torch
from lmdeploy.pytorch.models.patch import add_prefix
from lmdeploy.pytorch.nn.linear import build_colwise_linear, build_o_proj
from torch import nn


class Projections:
    """Builds LMDeploy's linear layers without bias, in the checkpoint's format.

    Args:
        config: the text config; its `quantization_config`, if any, tells LMDeploy to ask for the format by prefix.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device, prefix: str) -> None:
        self._prefix = prefix
        quant = getattr(config, 'quantization_config', None)
        self._options: dict[str, Any] = {'bias': False, 'dtype': dtype, 'device': device, 'quant_config': quant}

    def column(self, name: str, in_features: int, out_features: int, is_tp: bool) -> nn.Module:
        """A layer of which every rank has some outputs, or with `is_tp` false all of them."""
        prefix = add_prefix(name, self._prefix)
        return build_colwise_linear(in_features, out_features, is_tp=is_tp, prefix=prefix, **self._options)

    def output(self, name: str, in_features: int, out_features: int) -> nn.Module:
        """A layer of which every rank has some inputs; sums over the ranks."""
        return build_o_proj(
            in_features, out_features, is_tp=True, prefix=add_prefix(name, self._prefix), **self._options
        )
