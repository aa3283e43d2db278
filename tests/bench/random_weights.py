"""Random weights, written into the modules themselves."""

from __future__ import annotations

from typing import Any

import torch

from replayssm.random_weights import FP8_STD

STD = 0.02


@torch.inference_mode()
def fill_random(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Stand-in for LMDeploy's `load_model_weights`: norms 1, A_log and the router's bias 0, the rest N(0, 0.02)."""
    from lmdeploy.pytorch.weight_loader import model_weight_loader

    parameters = dict(model.named_parameters())
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in parameters.items():
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(0)
        _fill(name, parameter.data, generators[device])
    model.eval()
    model_weight_loader.process_weights_after_loading(model)


def _fill(name: str, data: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith(('A_log', 'e_score_correction_bias')):
        data.zero_()
    elif name.endswith('weight_scale_inv'):
        data.fill_(STD / FP8_STD)
    elif 'norm' in name and data.dim() == 1:
        data.fill_(0.0 if name.endswith('.bias') else 1.0)
    elif data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        # Experts one by one: a copy of all in BF16 would take twice their own memory.
        for part in data if data.dim() > 2 else (data,):
            part.copy_(torch.empty_like(part, dtype=torch.bfloat16).normal_(0, FP8_STD, generator=generator))
    elif data.dtype.is_floating_point:
        data.normal_(0, STD, generator=generator)
