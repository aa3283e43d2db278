"""A long decode on a GPU beside the stock kernel's."""

from __future__ import annotations

import pytest
import torch

from replayssm.cursor import advance_decode, read_prefill
from replayssm.gdn import decode
from replayssm.gdn.reference import gates, materialise, recurrence
from tests.replay.state_pool import packed_layers
from tests.replay.trial import Shape

pytestmark = pytest.mark.cuda


def test_8192_steps_drift_no_more_than_the_stock_kernel() -> None:
    """Relative state error against float64 after 8,192 tokens, on gates like a trained model's."""
    stock = pytest.importorskip('lmdeploy.pytorch.kernels.cuda.gated_delta_rule').fused_recurrent_gated_delta_rule
    shape = Shape(H=8, HV=16, K=128, V=128, L=16)
    layout = shape.layout(torch.bfloat16)
    (state,) = packed_layers(layout, 3, 'cuda')
    stock_state = torch.zeros(3, shape.HV, shape.V, shape.K, device='cuda')
    exact = torch.zeros(2, shape.HV, shape.V, shape.K, dtype=torch.float64, device='cuda')
    slots = torch.arange(1, 3, device='cuda')
    history, positions = torch.zeros_like(slots), torch.zeros(2, 2, dtype=torch.int32, device='cuda')
    # time constants of 1 to 1,000 tokens: A in 1..16, softplus(dt_bias) in 0.001..0.1
    neg_exp_a = -torch.linspace(0.0, 2.77, shape.HV, device='cuda').exp()
    dt_bias = torch.linspace(-2.3, -6.9, shape.HV, device='cuda')
    torch.manual_seed(0)
    for _ in range(8192):
        q, k = (torch.randn(2, 1, shape.H, shape.K, device='cuda').bfloat16() for _ in range(2))
        v = torch.randn(2, 1, shape.HV, shape.V, device='cuda').bfloat16()
        a, b = ((torch.randn(2, 1, shape.HV, device='cuda') / 2).bfloat16() for _ in range(2))
        advance = advance_decode(slots, history, torch.ones_like(slots), positions, shape.L, layout.ring_rows)
        decode.replay_decode(q, k, v, a, b, neg_exp_a, dt_bias, state, advance.table)
        positions, history = advance.positions, history + 1
        g, beta = gates(a, b, neg_exp_a, dt_bias)
        stock(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=stock_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            state_indices=slots,
            transpose_state_layout=True,
        )
        g, beta = gates(a, b, neg_exp_a.double(), dt_bias)
        exact = recurrence(q, k, v, g, beta, exact)[1][:, -1]
    ours = materialise(state, read_prefill(slots, history, positions, layout.ring_rows), torch.float64)
    error, stock_error = ((s - exact).norm() / exact.norm() for s in (ours, stock_state[slots].double()))
    print(f'relative state error after 8,192 tokens: ours {error:.2e}, stock {stock_error:.2e}')
    assert error < 1.5 * stock_error
    assert error < 1e-6
