"""Accept a chosen number of drafts whatever the target says, so that random weights behave like a trained model.

For benchmarks only: the answers are nobody's.
"""

from __future__ import annotations

from typing import Any

import torch
from lmdeploy.pytorch.backends.cuda.rejection_sampling import CudaRejectionSamplingImpl
from lmdeploy.pytorch.backends.default.rejection_sampling import DefaultRejectionSamplingImpl
from lmdeploy.pytorch.backends.rejection_sampling import RejectionSamplingImpl

from replayssm.patching import Patches

Shares = tuple[float, ...]


def install_everywhere(patches: Patches, shares: Shares) -> None:
    """Replace the greedy verification of all backends; see `install`."""
    for verification in (CudaRejectionSamplingImpl, DefaultRejectionSamplingImpl):
        install(patches, shares, verification=verification)


def install(
    patches: Patches,
    shares: Shares,
    seed: int = 0,
    verification: type[RejectionSamplingImpl] = CudaRejectionSamplingImpl,
) -> None:
    """Replace the greedy verification.

    Args:
        shares: share of steps that accept 0, 1, 2, ... drafts, at most as many entries as drafts + 1.
        verification: LMDeploy's operator, one per backend.
    """
    generators: dict[torch.device, torch.Generator] = {}

    @patches.wrap(verification, 'forward_greedy')
    def forward_greedy(
        verify: Any, self: Any, target_token_ids: torch.Tensor, draft_token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device = target_token_ids.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        weights = torch.tensor(shares, device=device).expand(target_token_ids.size(0), -1)
        accepted = torch.multinomial(weights, 1, generator=generators[device])[:, 0]
        return accept(target_token_ids, draft_token_ids, accepted)


def accept(
    target_token_ids: torch.Tensor, draft_token_ids: torch.Tensor, accepted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What LMDeploy's verification returns when `accepted` drafts of every row are right.

    Args:
        target_token_ids: [B, drafts + 1].
        draft_token_ids: [B, drafts].
        accepted: [B], 0..drafts.

    Returns:
        Output tokens [B, drafts + 1], -1 behind the bonus token; rejected drafts [B]; bonus tokens [B].
    """
    position = torch.arange(target_token_ids.size(1), device=target_token_ids.device)
    drafts = torch.nn.functional.pad(draft_token_ids, (0, 1))
    behind = torch.where(position == accepted[:, None], target_token_ids, -1)
    output = torch.where(position < accepted[:, None], drafts, behind)
    bonus = target_token_ids.gather(1, accepted[:, None])[:, 0]
    return output, draft_token_ids.size(1) - accepted, bonus
