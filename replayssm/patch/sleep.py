"""Leave nothing of the time before a sleep to the time after it.

`Engine.sleep` ends all sequences and drops the KV cache and the state pool on every rank. Two things stay behind:

- the output of the forward that the engine loop has sent ahead. The first request after the wake-up takes it for its
  own, and all later outputs are off by one;
- the scheduler's prefix trie, which goes on naming blocks and state slots. A prompt with a known prefix then starts
  from caches of zeros, or from what later requests have written there.
"""

from __future__ import annotations

import sys
from typing import Any

from lmdeploy.pytorch.engine import Engine
from lmdeploy.pytorch.engine.engine_loop import EngineLoop

from replayssm.patching import Patches


def install(patches: Patches) -> None:
    """Patch `EngineLoop` and `Engine.sleep`."""

    @patches.wrap(EngineLoop, '_prefetch_next_inputs')
    async def prefetch(stock: Any, self: Any) -> Any:
        inputs, running = await stock(self)
        self.has_sent_ahead = running is not None
        return inputs, running

    @patches.wrap(EngineLoop, 'drain_for_sleep')
    async def drain(stock: Any, self: Any) -> None:
        await stock(self)
        if getattr(self, 'has_sent_ahead', False):
            self.has_sent_ahead = False
            await self.executor.get_output_async()

    @patches.wrap(Engine, 'sleep')
    async def sleep(stock: Any, self: Any, level: int = 1) -> None:
        await stock(self, level)
        # All sequences have ended, so nothing else holds a block or a slot.
        _forget_prefixes(self.scheduler.block_trie)


def _forget_prefixes(trie: Any) -> None:
    """Release every block and checkpoint of the trie; mutated in place.

    Raises:
        RuntimeError: Something still uses one. Serving on would be serving from it.
    """
    trie.state_checkpoints.evict(sys.maxsize)
    trie.evict(sys.maxsize)
    left = sum(len(root.children) + (root.state_checkpoint is not None) for root in trie._roots.values())
    if left:
        raise RuntimeError(f'{left} cached prefixes are in use although no request is left')
