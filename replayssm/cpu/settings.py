"""Options of the CPU device type."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_ENV_THREADS = 'REPLAYSSM_CPU_THREADS'
_ENV_MEMORY = 'REPLAYSSM_CPU_MEMORY_BYTES'


@dataclass(frozen=True, slots=True)
class CpuSettings:
    """How much of the machine one tensor-parallel rank takes.

    Attributes:
        threads_per_rank: torch intra-op threads of one rank; `None` divides the usable cores by the number of ranks.
        memory_bytes: what a rank reports as free device memory, so that the engine sizes its caches from a fixed
            budget instead of from all of the host's memory.
    """

    threads_per_rank: int | None = None
    memory_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        if self.threads_per_rank is not None and self.threads_per_rank < 1:
            raise ValueError(f'threads_per_rank: expected at least 1, got {self.threads_per_rank}')
        if self.memory_bytes < 1:
            raise ValueError(f'memory_bytes: expected a positive number of bytes, got {self.memory_bytes}')

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> CpuSettings:
        """Read `REPLAYSSM_CPU_THREADS` and `REPLAYSSM_CPU_MEMORY_BYTES`; what is not set keeps its default.

        Raises:
            ValueError: a value that is no integer or out of range.
        """
        default = cls()
        threads = _integer(env, _ENV_THREADS)
        memory_bytes = _integer(env, _ENV_MEMORY)
        return cls(
            threads_per_rank=default.threads_per_rank if threads is None else threads,
            memory_bytes=default.memory_bytes if memory_bytes is None else memory_bytes,
        )

    def threads(self, world_size: int) -> int:
        """Return the torch threads of one of `world_size` ranks that share this machine."""
        if self.threads_per_rank is not None:
            return self.threads_per_rank
        return max(1, len(os.sched_getaffinity(0)) // world_size)


def _integer(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f'{name}: expected an integer, got {text!r}') from None
