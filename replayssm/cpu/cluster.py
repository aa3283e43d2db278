"""Ray resources of CPU ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmdeploy.pytorch import ray as ray_context
from lmdeploy.pytorch.engine.executor import ray_executor
from lmdeploy.pytorch.engine.mp_engine import ray_engine

from replayssm.config import CPU_RANK_RESOURCE
from replayssm.patching import Patches

_OBJECT_STORE_BYTES = 256 << 20
_STOP_TIMEOUT_S = 5.0


def install(patches: Patches) -> None:
    """Let the Ray executor place CPU ranks until `patches` is undone."""
    stock_device_str = ray_context.get_device_str
    stock_resource_kwargs = ray_context.get_resource_kwargs

    def get_device_str(device_type: str | None = None) -> str:
        device_type = device_type or ray_context.get_device_manager().current_context().device_type
        return CPU_RANK_RESOURCE if device_type == 'cpu' else stock_device_str(device_type)

    def get_resource_kwargs(device_str: str, resource_used: float = 0.01) -> dict[str, Any]:
        if device_str == CPU_RANK_RESOURCE:
            return {'resources': {CPU_RANK_RESOURCE: resource_used}}
        return stock_resource_kwargs(device_str, resource_used)

    for module in (ray_context, ray_executor, ray_engine):
        patches.set(module, 'get_device_str', get_device_str)
    for module in (ray_context, ray_engine):
        patches.set(module, 'get_resource_kwargs', get_resource_kwargs)
    _start_cluster(patches)
    _name_ranks(patches)
    _stop_ranks(patches)


def _start_cluster(patches: Patches) -> None:
    stock = ray_context.init_ray_cluster

    def init_ray_cluster(
        world_size: int, ray_address: str | None = None, dp: int = 1, device_type: str = 'cuda'
    ) -> tuple[Any, bool]:
        ray = ray_context.ray
        if device_type == 'cpu' and not ray.is_initialized():
            if ray_address is None:
                # "local", because a cluster that happens to run on this machine lacks the resource.
                ray.init(
                    address='local',
                    num_cpus=world_size,
                    resources={CPU_RANK_RESOURCE: world_size},
                    object_store_memory=_OBJECT_STORE_BYTES,
                    include_dashboard=False,
                )
            else:
                ray.init(address=ray_address)
        return stock(world_size, ray_address, dp, device_type)

    patches.set(ray_context, 'init_ray_cluster', init_ray_cluster)


def _name_ranks(patches: Patches) -> None:
    stock = ray_executor.RayExecutor._init_distributed_environment_by_device

    def init_distributed_environment(self: Any, device_str: str) -> None:
        if device_str != 'cpu':
            stock(self, device_str)
            return
        # Ranks have no device index to choose.
        self.workers = self._sort_workers(ray_executor._get_master_addr(), self.workers)

    patches.set(ray_executor.RayExecutor, '_init_distributed_environment_by_device', init_distributed_environment)


def _stop_ranks(patches: Patches) -> None:
    @patches.wrap(ray_executor.RayExecutor, 'stop')
    def stop(stock: Callable[..., None], self: Any) -> None:
        if self.device_type != 'cpu':
            stock(self)
            return
        # A rank told to stop before it runs a forward that another rank has begun leaves that one inside a gloo
        # collective, which blocks its event loop: it never gets to hear of the stop.
        ray = ray_context.ray
        try:
            self.collective_rpc('stop_async', timeout=_STOP_TIMEOUT_S)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorDiedError):
            for worker in self.workers:
                ray.kill(worker)
        if self._prefetch_task is not None:
            self._prefetch_task.cancel()
