"""What this machine can run, what is missing, and how to get it. Looks without loading torch, LMDeploy or Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

Status = Literal['ok', 'note', 'missing']
Need = Literal['cpu', 'gpu', 'deployment']

MODES: Mapping[Need, str] = {
    'cpu': 'engine on the CPU',
    'gpu': 'engine on GPUs',
    'deployment': 'deployment on Ray Serve',
}
ENGINE_MODES: tuple[Need, ...] = ('cpu', 'gpu')

_DISTRIBUTION = 'lmdeploy-replayssm'
_PACKAGES = ('lmdeploy', 'torch', 'triton', 'transformers', 'ray')
_MIN_COMPUTE_CAPABILITY = (8, 0)
_MIN_SHARED_MEMORY_BYTES = 1 << 30
_MIN_DISK_BYTES = 2 << 30
_PORTS = {8000: 'http_options.port', 9401: 'metrics.port'}
_RAY_ADDRESS_FILE = Path(tempfile.gettempdir()) / 'ray' / 'ray_current_cluster'
_CONNECT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        status: 'ok', 'note' for what nothing depends on, or 'missing'.
        remedy: what to do about it, empty when there is nothing to do.
        needed_for: modes that do not work while it is missing.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ''
    needed_for: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about a machine."""

    checks: tuple[Check, ...]

    @property
    def modes(self) -> dict[Need, bool]:
        """Which modes can run."""
        broken = {need for check in self.checks if check.status == 'missing' for need in check.needed_for}
        modes: dict[Need, bool] = {need: need not in broken for need in MODES}
        modes['deployment'] &= any(modes[mode] for mode in ENGINE_MODES)
        return modes

    @property
    def can_run(self) -> bool:
        """Whether an engine can run at all."""
        return any(self.modes[mode] for mode in ENGINE_MODES)


def examine() -> Report:
    """Look at this machine."""
    return Report(
        (
            *_check_host(),
            *_check_packages(),
            *_check_gpus(),
            _check_flash_attention(),
            _check_module('fla', 'flash-linear-attention', ('gpu',)),
            _check_module('tilelang', 'TileLang', ('gpu',)),
            _check_shared_memory(),
            _check_disk(),
            *(_check_port(port, option) for port, option in _PORTS.items()),
            _check_ray_cluster(os.environ.get('RAY_ADDRESS')),
        )
    )


def _check_host() -> Iterator[Check]:
    system = platform.system()
    yield Check(
        'system',
        'ok' if system == 'Linux' else 'missing',
        f'{system} {platform.machine()}, Python {platform.python_version()}',
        '' if system == 'Linux' else 'LMDeploy runs on Linux; use a Linux machine, container or WSL',
        ('cpu', 'gpu', 'deployment'),
    )
    if system == 'Linux':
        cores = len(os.sched_getaffinity(0))
        memory_bytes = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
        yield Check('CPU', 'ok', f'{cores} cores, {_gib(memory_bytes)} of memory')


def _check_packages() -> Iterator[Check]:
    supported = _supported_versions()
    for name in _PACKAGES:
        requirement = supported.get(name)
        wanted = str(requirement.specifier) if requirement is not None else ''
        remedy = f'pip install "{name}{wanted}"'
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, 'missing', 'not installed', remedy, tuple(MODES))
            continue
        detail = f'{version}, supported: {_bounds(requirement)}'
        if requirement is None or requirement.specifier.contains(version, prereleases=True):
            yield Check(name, 'ok', detail)
        else:
            yield Check(name, 'missing', detail, remedy, tuple(MODES))


def _bounds(requirement: Requirement | None) -> str:
    """Return the range of a requirement without the single versions that it leaves out."""
    specifiers = requirement.specifier if requirement is not None else ()
    return ','.join(sorted(str(specifier) for specifier in specifiers if specifier.operator != '!=')) or 'any'


def _supported_versions() -> dict[str, Requirement]:
    """Return what this package and LMDeploy require, by package; both say so in their own metadata."""
    found: dict[str, Requirement] = {}
    for distribution in (_DISTRIBUTION, 'lmdeploy'):
        with contextlib.suppress(metadata.PackageNotFoundError):
            for requirement in map(Requirement, metadata.requires(distribution) or ()):
                if requirement.marker is not None and not requirement.marker.evaluate({'extra': ''}):
                    continue
                known = found.setdefault(requirement.name, requirement)
                known.specifier &= requirement.specifier
    return found


def _check_gpus() -> Iterator[Check]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Check('NVML', 'note', str(error), 'install NVIDIA\'s driver; in a container, run it with "--gpus"')
        yield _no_gpu('none found')
        return
    try:
        yield Check('NVML', 'ok', f'driver {pynvml.nvmlSystemGetDriverVersion()}')
        newest = (0, 0)
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
            memory_bytes = pynvml.nvmlDeviceGetMemoryInfo(handle).total
            detail = (
                f'{pynvml.nvmlDeviceGetName(handle)}, {_gib(memory_bytes)}, compute capability {_dotted(capability)}'
            )
            yield Check(f'GPU {index}', 'ok' if capability >= _MIN_COMPUTE_CAPABILITY else 'note', detail)
            newest = max(newest, capability)
        if newest < _MIN_COMPUTE_CAPABILITY:
            yield _no_gpu(f'none of compute capability {_dotted(_MIN_COMPUTE_CAPABILITY)} or newer')
    finally:
        pynvml.nvmlShutdown()


def _no_gpu(detail: str) -> Check:
    return Check('GPU', 'missing', detail, 'use a machine with one, or the CPU', ('gpu',))


def _check_module(module: str, name: str, needed_for: tuple[Need, ...]) -> Check:
    if importlib.util.find_spec(module) is not None:
        return Check(name, 'ok', f'module {module}')
    return Check(name, 'missing', f'no module {module}', f'install {name}', needed_for)


def _check_flash_attention() -> Check:
    if importlib.util.find_spec('flash_attn_interface') is not None:
        return Check('FlashAttention-3', 'ok', 'module flash_attn_interface')
    remedy = 'install it for faster speculative decoding on Hopper GPUs; Triton stands in'
    return Check('FlashAttention-3', 'note', 'no module flash_attn_interface', remedy)


def _check_shared_memory() -> Check:
    path = Path('/dev/shm')
    if not path.is_dir():
        return Check('shared memory', 'note', 'no /dev/shm', 'Ray keeps objects on disk and is slower')
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < _MIN_SHARED_MEMORY_BYTES:
        remedy = f'Ray wants {_gib(_MIN_SHARED_MEMORY_BYTES)}; in a container, run it with "--shm-size=8g"'
        return Check('shared memory', 'note', f'{_gib(free_bytes)} free', remedy)
    return Check('shared memory', 'ok', f'{_gib(free_bytes)} free')


def _check_disk() -> Check:
    path = tempfile.gettempdir()
    usage = shutil.disk_usage(path)
    if usage.free < _MIN_DISK_BYTES:
        remedy = f'Ray and LMDeploy write to {path}; free {_gib(_MIN_DISK_BYTES)} or set TMPDIR'
        return Check('disk', 'missing', f'{_gib(usage.free)} free at {path}', remedy, ('deployment',))
    return Check('disk', 'ok', f'{_gib(usage.free)} free at {path}')


def _check_port(port: int, option: str) -> Check:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(('127.0.0.1', port))
        except OSError as error:
            return Check(f'port {port}', 'note', error.strerror or str(error), f'free it, or set {option}')
    return Check(f'port {port}', 'ok', 'free')


def _check_ray_cluster(address: str | None) -> Check:
    if not address and _RAY_ADDRESS_FILE.is_file():
        address = _RAY_ADDRESS_FILE.read_text().strip()
    if not address or address == 'local':
        return Check(
            'Ray cluster', 'note', 'none', '`make serve` starts one of its own; `serve run` needs `ray start --head`'
        )
    host, _, port = address.removeprefix('ray://').rpartition(':')
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return Check(
            'Ray cluster', 'note', f'{address}: {error}', 'start it with `ray start --head`, or unset RAY_ADDRESS'
        )
    return Check('Ray cluster', 'ok', address)


def _dotted(version: tuple[int, ...]) -> str:
    return '.'.join(map(str, version))


def _gib(size_bytes: int) -> str:
    return f'{size_bytes / (1 << 30):.1f} GiB'
