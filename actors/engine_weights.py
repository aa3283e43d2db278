"""Sleep, wake-up and other weights of LMDeploy's engine."""

from __future__ import annotations

from typing import Any, Literal

from actors.checkpoint import Checkpoint


class EngineWeights:
    """What an engine holds of its checkpoint. Coroutines run on the engine's loop, once its requests have ended."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._checkpoint = Checkpoint.read(engine.model_path)
        self._sleep_level = 0
        self.version = 0
        """See `WorkerReport.weights_version`."""

    def checkpoint(self, path: str | None) -> Checkpoint:
        """Return the checkpoint in folder `path`, None for the present one, as it is now.

        Raises:
            CheckpointMismatch: Its architecture is another one, or there is none.
        """
        checkpoint = Checkpoint.read(path or self._checkpoint.folder)
        self._checkpoint.require_same_architecture(checkpoint)
        return checkpoint

    async def sleep(self, level: Literal[1, 2]) -> None:
        """Release caches and states, and the weights: to the host's memory at level 1, altogether at level 2."""
        self.version += 1
        await self._engine.sleep(level)
        self._sleep_level = max(level, self._sleep_level)

    async def wakeup(self) -> None:
        """End a sleep; weights that were dropped are read again."""
        if self._sleep_level == 2:
            await self._load(self._checkpoint)
        else:
            self._engine.wakeup()
            self._sleep_level = 0

    async def replace(self, checkpoint: Checkpoint) -> None:
        """Read the weights of a checkpoint of the same architecture, awake or asleep, and be awake."""
        await self.sleep(2)
        await self._load(checkpoint)

    async def _load(self, checkpoint: Checkpoint) -> None:
        from replayssm import patch

        await patch.load_weights(self._engine, checkpoint.folder)
        self._checkpoint, self._sleep_level = checkpoint, 0
