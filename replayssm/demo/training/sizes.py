"""Shapes of the demo models that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from replayssm.demo.specs import DemoSpec

SIZES: Mapping[str, DemoSpec] = MappingProxyType(
    {
        # 128-wide heads are what the kernels for Hopper GPUs are made for; 16 MB of bfloat16 bound all else.
        'small': DemoSpec(
            '7 M parameters, 8 layers; speaks',
            hidden_size=256,
            intermediate_size=384,
            num_blocks=2,
            key_heads=2,
            value_heads=2,
            key_head_dim=128,
            value_head_dim=128,
            attention_heads=4,
            kv_heads=2,
            attention_head_dim=64,
            vocab_size=3072,
        ),
        'mini': DemoSpec(
            '1 M parameters, 4 layers; learns a little within minutes on a CPU', hidden_size=128, vocab_size=1024
        ),
    }
)
