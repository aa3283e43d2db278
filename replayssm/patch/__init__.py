"""ReplaySSM and the upstream fixes, installed into LMDeploy's classes: explicit, idempotent and reversible.

`enable` must run before an engine is built, in the process that builds it; worker processes of the engine's executors
follow by themselves. `disable` restores LMDeploy bit for bit; call it after the engine is closed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from replayssm.config import ReplayConfig
from replayssm.patching import Patches

if TYPE_CHECKING:
    from typing import Any

    from replayssm.stats import ReplayStats

__all__ = ['Fixes', 'Settings', 'collect', 'current', 'disable', 'enable', 'load_weights']


@dataclass(frozen=True, slots=True)
class Fixes:
    """Corrections of LMDeploy 0.18.0, each on its own switch; docs/en/fixes.md describes them.

    Attributes:
        continuation: recompute private KV and state of a sequence that ran ahead of its retained history.
        mrope: keep MRoPE rows and token ids aligned under speculative decoding.
        conv_tail: save the right convolution state after chunks shorter than the convolution.
        ray_free: release the inputs of every forward in Ray's object store.
        window_attention: verify drafts on CUDA without FlashAttention-3.
        fresh_state: start a sequence from a zero state on CUDA instead of a gate that rounds its neighbours.
        sleep: leave no output and no cached prefix of the time before a sleep to the time after it.
    """

    continuation: bool = True
    mrope: bool = True
    conv_tail: bool = True
    ray_free: bool = True
    window_attention: bool = True
    fresh_state: bool = True
    sleep: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    """What `enable` installs.

    Attributes:
        random_weights: draw weights in place of reading them; for benchmarks.
        accepted_drafts: share of verify steps that accept 0, 1, 2, ... drafts whatever the target says, empty to
            verify; for benchmarks.

    Raises:
        ValueError: ReplaySSM without the continuation fix, since records behind a checkpoint cannot be taken back; or
            the continuation fix without the mrope fix, since a recomputed history needs positions of its own length.
    """

    replay: ReplayConfig | None = None
    fixes: Fixes = field(default_factory=Fixes)
    random_weights: bool = False
    accepted_drafts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.replay is not None and not self.fixes.continuation:
            raise ValueError('fixes.continuation: expected True with ReplaySSM enabled, got False')
        if self.fixes.continuation and not self.fixes.mrope:
            raise ValueError('fixes.mrope: expected True with fixes.continuation, got False; switch both off together')


_patches = Patches()
_settings: Settings | None = None


def enable(settings: Settings | ReplayConfig) -> None:
    """Install `settings`, in place of those installed before. A bare `ReplayConfig` comes with all fixes.

    Raises:
        RuntimeError: this version of LMDeploy is not supported; the message lists those that are.
    """
    global _settings
    if isinstance(settings, ReplayConfig):
        settings = Settings(replay=settings)
    if settings == _settings:
        return
    disable()
    from replayssm.patch import compat

    compat.check_version()
    from replayssm import models
    from replayssm.patch import (
        continuation,
        conv_tail,
        engine_stats,
        fresh_state,
        mrope,
        recurrent,
        schema,
        sleep,
        step,
        weights,
        window_attention,
    )

    try:
        modules = [continuation, mrope, conv_tail, window_attention, sleep]
        if settings.replay is None:
            # With replay prefill starts from materialised states and has no use for the gate.
            modules.append(fresh_state)
        if importlib.util.find_spec('ray') is not None:
            # Without Ray every engine runs in one process.
            from replayssm import executors
            from replayssm.patch import ray_free

            executors.enable(_patches)
            modules.append(ray_free)
        for module in modules:
            if getattr(settings.fixes, module.__name__.rpartition('.')[2]):
                module.install(_patches)
        models.install(_patches)
        schema.install(_patches, settings.replay)
        engine_stats.install(_patches)
        weights.install(_patches)
        if settings.replay is not None:
            step.install(_patches)
            recurrent.install(_patches)
        _install_for_benchmarks(settings)
    except BaseException:
        _patches.undo()
        raise
    _settings = settings


def _install_for_benchmarks(settings: Settings) -> None:
    if settings.random_weights:
        from replayssm.patch import random_weights

        random_weights.install(_patches)
    if settings.accepted_drafts:
        from replayssm.patch import forced_acceptance

        forced_acceptance.install_everywhere(_patches, settings.accepted_drafts)


def disable() -> None:
    """Restore LMDeploy."""
    global _settings
    _patches.undo()
    _settings = None


def current() -> Settings | None:
    """Settings that are installed, None without any."""
    return _settings


async def collect(engine: Any) -> ReplayStats:
    """State memory, capacity and counters of a running engine (`lmdeploy.pytorch.engine.Engine`)."""
    from replayssm.patch import engine_stats

    return await engine_stats.collect(engine)


async def load_weights(engine: Any, folder: str) -> None:
    """Wake an engine up from a sleep of level 2, with the weights of the checkpoint in `folder`.

    Args:
        engine: A sleeping `lmdeploy.pytorch.engine.Engine`.
        folder: Checkpoint of the same architecture, tensors by the same names and shapes.
    """
    from replayssm.patch import weights

    await weights.load(engine, folder)
