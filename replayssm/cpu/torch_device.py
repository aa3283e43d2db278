"""The device "cuda" that LMDeploy hard-codes, mapped to the CPU in this process.

LMDeploy names "cuda" in its cache engines, model agent and input makers and leaves it to other device types to
redirect that name inside torch. Only what those call sites use is redirected.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

# Dynamo keeps a table of torch's functions from when it is first imported: let that be before they are replaced.
import torch._dynamo
from torch.utils._device import _device_constructors

from replayssm.cpu.settings import CpuSettings
from replayssm.patching import Patches

_CPU = torch.device('cpu')

_FACTORIES = (
    'arange', 'as_tensor', 'empty', 'empty_like', 'empty_strided', 'eye', 'full', 'full_like', 'linspace', 'ones',
    'ones_like', 'rand', 'rand_like', 'randint', 'randn', 'randn_like', 'randperm', 'scalar_tensor', 'tensor',
    'zeros', 'zeros_like',
)  # fmt: skip
_TENSOR_FACTORIES = ('new_empty', 'new_full', 'new_ones', 'new_tensor', 'new_zeros')


class Stream:
    """A stream whose work has always finished: on a CPU every operator runs before its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU
        self.cuda_stream = 0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A point in time that has always been reached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._time_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between the two recordings."""
        return (end_event._time_s - self._time_s) * 1e3


def install(patches: Patches, settings: CpuSettings) -> None:
    """Redirect torch's "cuda" to the CPU until `patches` is undone."""
    # `with torch.device(...)` keeps the factories that it has found the first time: let those be the real ones.
    _device_constructors()
    for name in _FACTORIES:
        patches.set(torch, name, _without_cuda_keywords(getattr(torch, name)))
    for name in _TENSOR_FACTORIES:
        patches.set(torch.Tensor, name, _without_cuda_keywords(getattr(torch.Tensor, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        patches.set(owner, 'to', _without_cuda_arguments(owner.to))
        patches.set(owner, 'cuda', _return_self)
    patches.set(torch.Tensor, 'pin_memory', _return_self)
    patches.set(torch.Tensor, 'record_stream', _ignore)
    for name, value in _cuda_module(settings).items():
        patches.set(torch.cuda, name, value)


def _cuda_module(settings: CpuSettings) -> dict[str, Any]:
    """Return the stand-ins for the attributes of `torch.cuda` that the engine uses."""
    default_stream = Stream()

    @contextlib.contextmanager
    def stream(stream: Stream | None) -> Iterator[None]:
        yield

    properties = SimpleNamespace(
        name='cpu', major=0, minor=0, uuid='cpu', total_memory=settings.memory_bytes, multi_processor_count=1
    )
    return {
        'Stream': Stream,
        'Event': Event,
        'stream': stream,
        'current_stream': lambda device=None: default_stream,
        'default_stream': lambda device=None: default_stream,
        # A device rather than an index, because call sites pass it on to `Module.to`.
        'current_device': lambda: _CPU,
        'set_device': _ignore,
        'synchronize': _ignore,
        'empty_cache': _ignore,
        'mem_get_info': lambda device=None: (settings.memory_bytes, settings.memory_bytes),
        'get_device_name': lambda device=None: 'cpu',
        'get_device_properties': lambda device=None: properties,
    }


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith('cuda')
    return isinstance(device, torch.device) and device.type == 'cuda'


def _without_cuda_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory, whose device and pinning are keywords."""

    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get('device')):
                kwargs['device'] = _CPU
            if kwargs.get('pin_memory'):
                kwargs['pin_memory'] = False
        return function(*args, **kwargs)

    return factory


def _without_cuda_arguments(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `to` method, whose device may be positional."""

    @functools.wraps(method)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if kwargs and _is_cuda(kwargs.get('device')):
            kwargs['device'] = _CPU
        return method(self, *args, **kwargs)

    return to


def _return_self(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass
