"""Which implementation of the gated delta rule transformers trains with."""

from __future__ import annotations

import sys


def choose(device: str) -> str:
    """Let transformers take fla's kernels where they train, else its own in PyTorch; return which.

    Call it before transformers' Qwen3.5 is imported: that is when transformers binds one of the two.
    """
    reason = 'a CPU has no Triton'
    if device != 'cpu':
        try:
            _train_once(device)
        except Exception as error:  # Whatever a compiler of kernels raises.
            # On Hopper fla refuses the backward pass with Triton before 3.7.1 where TileLang is missing.
            reason = f'{type(error).__name__}: {error}'
        else:
            return 'fla'
    sys.modules['fla'] = None  # type: ignore[assignment]
    return f'PyTorch ({reason})'


def _train_once(device: str) -> None:
    """Run fla's kernels forwards and backwards on a few tokens."""
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    rows = 1, 128, 2
    query, key, value = (random(*rows, 128) for _ in range(3))
    decay, beta = -random(*rows, dtype=torch.float32).exp(), random(*rows).sigmoid()
    output, _ = chunk_gated_delta_rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
    output.float().square().sum().backward()
    if not (query.grad is not None and query.grad.isfinite().all()):
        raise FloatingPointError('fla: expected finite gradients')
