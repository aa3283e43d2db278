"""Free the inputs of every forward that LMDeploy's Ray executor has sent.

`RayExecutor.forward_async` calls `ray.internal.free`, which Ray 2.60 no longer has: each forward logs a warning. Ray
offers no other call in its place. It frees an object when the last reference to it goes, and a running task holds one,
so letting go of ours as soon as the tasks are submitted frees the inputs the moment the slowest worker has read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from lmdeploy.pytorch.engine.executor import ray_executor

from replayssm.patching import Patches

Forward = Callable[[Any, Any], Awaitable[None]]


def install(patches: Patches) -> None:
    """Replace `RayExecutor.forward_async`."""
    executor = ray_executor.RayExecutor
    patches.set(executor, 'forward_async', _release_inputs_after(executor.forward_async))


def _release_inputs_after(forward_async: Forward) -> Forward:
    @wraps(forward_async)
    async def wrapper(self: Any, inputs: Any) -> None:
        pending = getattr(self, '_prev_out', None)
        if pending is not None:
            try:
                await asyncio.gather(*pending)
            except (SystemExit, ray_executor.ray.exceptions.RayActorError):
                ray_executor.logger.error('Ray worker exited.')
                raise
            # With nothing pending the original skips its own wait, and with it the call to the missing function.
            self._prev_out = None
        await forward_async(self, inputs)
        self._prev_inputs = None

    return wrapper
