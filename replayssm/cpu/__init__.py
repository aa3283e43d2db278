"""Device type "cpu" for LMDeploy's PyTorch engine: the same scheduler, paging and executors on CPU tensors."""

from __future__ import annotations

import functools

import torch

from replayssm.cpu.deferred_compile import deferred_compile
from replayssm.cpu.settings import CpuSettings
from replayssm.patching import Patches

__all__ = ['CpuSettings', 'disable', 'enable', 'is_enabled', 'settings']

_patches = Patches()
_settings: CpuSettings | None = None
_stock_threads: int | None = None


def enable(settings: CpuSettings | None = None) -> None:
    """Make `PytorchEngineConfig(device_type='cpu')` work in this process and in the ranks it starts.

    Torch's device "cuda" means the CPU from here on, so a process uses either its GPUs or this. Enabling again with
    the same settings changes nothing.

    Args:
        settings: `None` reads them from the environment on the first call and keeps the current ones later.

    Raises:
        RuntimeError: CUDA is already in use in this process, or other settings are already in force.
    """
    global _settings, _stock_threads
    if _settings is not None:
        if settings not in (None, _settings):
            raise RuntimeError(f'the cpu device type is already enabled with {_settings}; disable it first')
        return
    if torch.cuda.is_initialized():
        raise RuntimeError('CUDA is already initialised in this process; run the cpu device type in one of its own')
    settings = settings or CpuSettings.from_env()

    with deferred_compile():
        from replayssm import executors
        from replayssm.cpu import backend, broadcast, cluster, engine_config, torch_device

    try:
        torch_device.install(_patches, settings)
        engine_config.install(_patches)
        backend.install(_patches)
        cluster.install(_patches)
        broadcast.install(_patches)
        executors.enable(_patches)
        # Compiling LMDeploy's sampler would stop the first requests for half a minute and gain nothing at this size.
        torch.compiler.set_stance('force_eager')
        _patches.on_undo(functools.partial(torch.compiler.set_stance, 'default'))
    except BaseException:
        _patches.undo()
        raise
    if settings.threads_per_rank is not None:
        _stock_threads = torch.get_num_threads()
        torch.set_num_threads(settings.threads_per_rank)
    _settings = settings


def disable() -> None:
    """Undo `enable`; engines built meanwhile stop working. Without effect when not enabled."""
    global _settings, _stock_threads
    _patches.undo()
    if _stock_threads is not None:
        torch.set_num_threads(_stock_threads)
    _settings = _stock_threads = None


def is_enabled() -> bool:
    """Tell whether device type "cpu" is available in this process."""
    return _settings is not None


def settings() -> CpuSettings | None:
    """Return the settings in force, `None` when not enabled."""
    return _settings
