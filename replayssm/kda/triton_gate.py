"""The forget gate as one device function, for every place of the portable kernels that needs it."""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.gdn.triton_decode import log1p


@triton.jit
def log_gate(b_a, b_bias, neg_exp_a, lower_bound, BOUNDED: tl.constexpr):
    """Log-space gates of raw logits: `reference.gates`."""
    b_x = b_a.to(tl.float32) + b_bias
    if BOUNDED:
        b_g = lower_bound * tl.sigmoid(-neg_exp_a * b_x)
    else:
        b_g = neg_exp_a * (tl.maximum(b_x, 0.0) + log1p(tl.exp(-tl.abs(b_x))))
    return b_g
