"""Child processes of the engine, and its place in a Ray cluster that it does not own.

LMDeploy starts its ranks and its separate engine process from its own classes, which know nothing of this package.
`enable` makes it start the subclasses below: the parent's set-up travels with their arguments and is installed before
an engine class runs in the child.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmdeploy.pytorch import ray as ray_context
from lmdeploy.pytorch.devices import DeviceContext, get_device_manager
from lmdeploy.pytorch.engine.executor import mp_executor, ray_executor
from lmdeploy.pytorch.engine.mp_engine import ray_engine, zmq_engine

from replayssm.patching import Patches

if TYPE_CHECKING:
    from replayssm.cpu import CpuSettings
    from replayssm.patch import Settings


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """What of this package is enabled in a process; picklable.

    Attributes:
        cpu: settings of the cpu device type, `None` when it is not enabled.
        patch: settings of `replayssm.patch`, `None` when it is not enabled.
    """

    cpu: CpuSettings | None = None
    patch: Settings | None = None


def current_setup() -> ProcessSetup:
    """Return the set-up of this process."""
    from replayssm import cpu, patch

    return ProcessSetup(cpu=cpu.settings(), patch=patch.current())


def install_setup(setup: ProcessSetup, world_size: int = 1) -> None:
    """Make this process, one of `world_size` ranks, like the one that `setup` was taken from."""
    if setup.cpu is not None:
        import torch

        from replayssm import cpu

        cpu.enable(setup.cpu)
        torch.set_num_threads(setup.cpu.threads(world_size))
        # The process group is built outside any device context, from the backend of the default one.
        get_device_manager().set_context(DeviceContext('cpu'))
    if setup.patch is not None:
        from replayssm import patch

        patch.enable(setup.patch)


class RayRank(ray_executor.RayWorkerWrapper):
    """A rank of the Ray executor."""

    def __init__(self, *args: Any, setup: ProcessSetup, **kwargs: Any) -> None:
        install_setup(setup, kwargs['dist_config'].world_size)
        super().__init__(*args, **kwargs)


class ProcessRank(mp_executor.ExecutorProc):
    """A rank of the multiprocessing executor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.setup = current_setup()

    def _main_loop(self, *args: Any, **kwargs: Any) -> None:
        install_setup(self.setup, kwargs['dist_config'].world_size)
        super()._main_loop(*args, **kwargs)


class RayEngine(ray_engine.RayEngineWorker):
    """An engine in a Ray actor of its own."""

    def __init__(self, *args: Any, setup: ProcessSetup, **kwargs: Any) -> None:
        install_setup(setup)
        super().__init__(*args, **kwargs)


_stock_engine_process = zmq_engine.ZMQMPEngine._mp_proc


def _engine_process(*args: Any, setup: ProcessSetup, **kwargs: Any) -> None:
    """Run an engine in a process of its own."""
    install_setup(setup)
    _stock_engine_process(*args, **kwargs)


_installed = Patches()
_num_holders = 0


def enable(patches: Patches) -> None:
    """Start child processes with this process's set-up until `patches` is undone.

    Several holders may ask for this; it lasts until the last of their `patches` is undone, in any order.
    """
    global _num_holders
    if _num_holders == 0:
        _install(_installed)
    _num_holders += 1
    patches.on_undo(_release)


def _release() -> None:
    global _num_holders
    _num_holders -= 1
    if _num_holders == 0:
        _installed.undo()


def _install(patches: Patches) -> None:
    patches.set(ray_executor, 'RayWorkerWrapper', RayRank)
    patches.set(mp_executor, 'ExecutorProc', ProcessRank)
    patches.set(ray_engine, 'RayEngineWorker', RayEngine)
    patches.set(zmq_engine.ZMQMPEngine, '_mp_proc', staticmethod(_engine_process))
    _send_setup(patches)
    _share_ray(patches)


def _send_setup(patches: Patches) -> None:
    """Add the set-up to the arguments that the children are constructed with."""
    stock_init_workers = ray_executor.RayExecutor._init_workers_ray
    stock_create_worker = ray_engine.RayMPEngine._create_worker
    stock_start_process = zmq_engine.ZMQMPEngine._start_mp_proc

    def init_workers(self: Any, placement_group: Any, worker_kwargs: dict[str, Any]) -> Any:
        return stock_init_workers(self, placement_group, worker_kwargs | {'setup': current_setup()})

    def create_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock_create_worker(self, *args, setup=current_setup(), **kwargs)

    def start_process(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_start_process(self, *args, setup=current_setup(), **kwargs)

    patches.set(ray_executor.RayExecutor, '_init_workers_ray', init_workers)
    patches.set(ray_engine.RayMPEngine, '_create_worker', create_worker)
    patches.set(zmq_engine.ZMQMPEngine, '_start_mp_proc', start_process)


def _share_ray(patches: Patches) -> None:
    """Behave in a Ray actor: leave its connection and the order of its placement group alone."""
    stock_init = ray_context.RayContext.__init__
    stock_shutdown = ray_context.RayContext.shutdown
    stock_sort = ray_executor.RayExecutor._sort_workers

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        was_connected = ray_context.ray.is_initialized()
        stock_init(self, *args, **kwargs)
        self.owns_connection = not was_connected

    def shutdown(self: Any) -> None:
        if getattr(self, 'owns_connection', True):
            stock_shutdown(self)
        elif self.owned_pg:
            ray_context.ray.util.remove_placement_group(self.placement_group)

    def sort_workers(self: Any, driver_ip: str, workers: list[Any]) -> list[Any]:
        # Whoever brings the placement group has ordered its bundles: rank i stays on bundle i.
        return stock_sort(self, driver_ip, workers) if self.ray_ctx.owned_pg else workers

    patches.set(ray_context.RayContext, '__init__', init)
    patches.set(ray_context.RayContext, 'shutdown', shutdown)
    patches.set(ray_executor.RayExecutor, '_sort_workers', sort_workers)
