"""Compiling a kernel for a GPU on a machine without one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget


class OfflineDriver:
    """As much of a Triton driver as compiling takes; a device of its own for every compute capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget('cuda', self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launch(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, capability: int, launch: Callable[..., object], *arguments: Any
) -> Any:
    """Return what `launch(*arguments)` compiles of the jitted `kernel`, without running it."""
    compiled = []
    run = kernel.run

    def compile_only(*args: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(*args, warmup=True, **kwargs))

    monkeypatch.setattr(kernel, 'run', compile_only)
    monkeypatch.setattr(triton.runtime.driver, '_active', OfflineDriver(capability))
    launch(*arguments)
    (binary,) = compiled
    assert len(binary.asm['cubin']) > 0
    return binary


def stack_bytes(binary: Any) -> int:
    """Bytes of registers that a thread of the compiled kernel spills."""
    tool = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(binary.asm['cubin'])
        file.flush()
        command = [tool, '--dump-resource-usage', file.name]
        usage = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return max(map(int, re.findall(r'STACK:(\d+)', usage)))
