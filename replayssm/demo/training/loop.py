"""The training loop: it knows its deadline, and leaves a whole checkpoint behind at any time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from replayssm.demo.training.batches import Sampler
from replayssm.demo.training.export import save_weights
from replayssm.demo.training.trainee import Losses, Trainee

_WARM_UP, _DECAY_FROM, _LAST_SCALE = 0.02, 0.5, 0.02
_WEIGHT_DECAY = 0.1
_LOGS, _SAVES = 100, 10
_MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to train.

    Attributes:
        train_s: seconds, after which training stops whatever it has reached.
        learning_rate: of the stable phase.
        max_steps: stop earlier, for a test.
    """

    train_s: float
    learning_rate: float
    max_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the loss curves: averages since the point before.

    Attributes:
        elapsed_s: seconds since training began.
        tokens: tokens trained on so far.
        loss: the target's, nats a token.
        draft_losses: cross-entropy of each draft against the target's distribution, nats.
        agreement: share of each draft that is the target's first choice, when all before it were right.
    """

    step: int
    elapsed_s: float
    tokens: int
    loss: float
    draft_losses: list[float]
    agreement: list[float]


@dataclass(slots=True)
class _Mean:
    """Sums of losses, left on the device until they are read."""

    count: int = 0
    sums: torch.Tensor | None = None

    def add(self, losses: Losses) -> None:
        row = torch.cat((losses.target.detach()[None], losses.drafts.detach(), losses.agreement))
        self.sums = row if self.sums is None else self.sums + row
        self.count += 1

    def point(self, step: int, elapsed_s: float, tokens: int) -> Point:
        """Return the means as a point of the curves, and start again."""
        assert self.sums is not None
        loss, *others = (self.sums / self.count).tolist()
        if not math.isfinite(loss):
            raise FloatingPointError(f'loss: expected a finite number, got {loss} at step {step}')
        self.sums, self.count = None, 0
        drafts = len(others) // 2
        return Point(step, round(elapsed_s, 2), tokens, loss, others[:drafts], others[drafts:])


@dataclass(slots=True)
class Optimizers:
    """Muon for the matrices between embedding and head, AdamW for all else; both take the same learning rate."""

    trainee: Trainee
    learning_rate: float
    _members: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        matrices: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for name, weight in self.trainee.named_parameters():
            if weight.requires_grad:
                is_inner = weight.ndim == 2 and 'embed_tokens' not in name and 'lm_head' not in name
                (matrices if is_inner else others).append(weight)
        self._members = [
            torch.optim.Muon(
                matrices, lr=self.learning_rate, weight_decay=_WEIGHT_DECAY, adjust_lr_fn='match_rms_adamw'
            ),
            torch.optim.AdamW(others, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, scale: float) -> None:
        """Move the weights by their gradients with `scale` times the learning rate, and forget the gradients."""
        for member in self._members:
            for group in member.param_groups:
                group['lr'] = self.learning_rate * scale
            member.step()
            member.zero_grad(set_to_none=True)


def scale_at(progress: float) -> float:
    """Return the factor of the learning rate at `progress` (0 to 1): a ramp, a plateau, and a slope to almost nothing.

    The slope depends on the time that is left, so that a slow machine ends with settled weights too.
    """
    if progress < _WARM_UP:
        return max(progress / _WARM_UP, 0.01)
    slope = max(0.0, progress - _DECAY_FROM) / (1 - _DECAY_FROM)
    return max(_LAST_SCALE, 1 - min(slope, 1.0))


def train(
    trainee: Trainee, sampler: Sampler, plan: Plan, folder: Path, log: Callable[[Point], None], autocast: bool
) -> list[Point]:
    """Train in place until the plan's time is over, saving into `folder` now and then; return the loss curves.

    Args:
        log: is called with every point of the curves.
        autocast: compute in bfloat16; the weights stay float32.

    Raises:
        FloatingPointError: the loss is no longer finite; what was saved last stays.
    """
    optimizers = Optimizers(trainee, plan.learning_rate)
    weights = [weight for weight in trainee.parameters() if weight.requires_grad]
    device = weights[0].device.type
    points: list[Point] = []
    mean = _Mean()
    start, step, saves = time.monotonic(), 0, 0
    trainee.train()
    while True:
        elapsed_s = time.monotonic() - start
        progress = max(elapsed_s / plan.train_s, step / plan.max_steps if plan.max_steps else 0.0)
        # The first step, which may compile kernels, is taken whatever it costs.
        is_over = progress >= 1 and step > 0
        if mean.count and (is_over or progress * _LOGS >= len(points) + 1):
            # Reading the losses waits for the device, so that the clock is right again.
            points.append(mean.point(step, elapsed_s, step * sampler.rows * sampler.length))
            log(points[-1])
        if is_over or progress * _SAVES >= saves + 1:
            save_weights(trainee, folder)
            saves = int(progress * _SAVES)
        if is_over:
            return points
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            losses = trainee(sampler.batch())
        # Neither loss has a gradient for the other's weights.
        (losses.target + losses.drafts.sum()).backward()
        torch.nn.utils.clip_grad_norm_(weights, _MAX_GRADIENT_NORM)
        optimizers.step(scale_at(progress))
        mean.add(losses)
        step += 1
