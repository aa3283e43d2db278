"""What NVML says about the GPU of one rank."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pynvml
import torch

from replayssm.stats import GpuStats


class GpuReader:
    """Reads one GPU and remembers the most memory that it has seen in use.

    Args:
        device: a CUDA device of this process; NVML numbers GPUs of the host, whatever the process can see.

    Raises:
        pynvml.NVMLError: there is no driver, or NVML does not know the device, as a slice of a partitioned GPU.
    """

    def __init__(self, device: torch.device) -> None:
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f'GPU-{torch.cuda.get_device_properties(device).uuid}')
        self._index = pynvml.nvmlDeviceGetIndex(self._handle)
        self._node = socket.gethostname()
        self._peak_bytes = 0

    def read(self) -> GpuStats:
        """Return the GPU's state of this moment."""
        memory: Any = None
        utilization = None
        with contextlib.suppress(pynvml.NVMLError):
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
            self._peak_bytes = max(self._peak_bytes, memory.used)
        with contextlib.suppress(pynvml.NVMLError):
            utilization = pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        return GpuStats(
            self._node,
            self._index,
            memory_used_bytes=memory and memory.used,
            memory_peak_bytes=self._peak_bytes or None,
            memory_total_bytes=memory and memory.total,
            utilization_ratio=utilization,
        )


def open_gpu(device: torch.device) -> GpuReader | None:
    """Return a reader, or None where NVML has nothing to say about the device."""
    if device.type != 'cuda':
        return None
    try:
        return GpuReader(device)
    except pynvml.NVMLError:
        return None
