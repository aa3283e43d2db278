"""Gates of channels, and records of their logits."""

from __future__ import annotations

import pytest
import torch

from replayssm.kda.reference import gates, replay_decode
from tests.replay.trial import KdaShape


@pytest.mark.parametrize('bound', [None, -5.0])
def test_gate_records_in_bfloat16_lose_nothing(bound: float | None) -> None:
    """Records of bfloat16 logits, with everything else in float32, are as exact as float32 records."""
    trial = KdaShape(T=2, L=16, bound=bound).trial(3)
    trial.state = trial.state._replace(gate=trial.state.gate.bfloat16())

    def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, *rest: object) -> torch.Tensor:
        a.copy_(a.bfloat16())
        return replay_decode(q, k, v, a, *rest)  # type: ignore[arg-type]

    assert max(trial.step(decode) for _ in range(60)) < 2e-5


def test_the_bound_multiplies_and_does_not_clamp() -> None:
    a, rate = torch.tensor([[[-40.0, 0.0, 40.0]]]), torch.tensor([-2.0])
    g, _ = gates(a, torch.zeros(1, 1), rate, torch.zeros(1, 3), lower_bound=-5.0)
    torch.testing.assert_close(g, torch.tensor([[[0.0, -2.5, -5.0]]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize('bound', [None, -5.0])
def test_gates_equal_transformers(bound: float | None) -> None:
    torch.manual_seed(0)
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextConfig, Glm5NextTextForgetGate

    config = Glm5NextTextConfig(hidden_size=24, linear_num_heads=3, linear_head_dim=8, num_hidden_layers=4)
    config.linear_lower_bound = bound
    module = Glm5NextTextForgetGate(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 5, 24)
    raw = module.f_b_proj(module.f_a_proj(x)).unflatten(-1, (3, 8))
    g, _ = gates(raw, raw[..., 0], -module.A_log.exp(), module.dt_bias.view(3, 8), bound)
    torch.testing.assert_close(g, module(x), rtol=2e-5, atol=2e-6)
