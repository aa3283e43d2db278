"""What Serve leaves out: a word before a replica stops, and quick calls between replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray._private.worker import global_worker

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


def is_stopping() -> bool:
    """Tell whether Serve is stopping the replica of this process.

    Serve lets running requests end before it calls `__del__`, and there is no word before that; this is its own note.
    """
    (actor,) = global_worker.actors.values()
    return bool(actor._replica_impl._shutting_down)


def by_value(handle: DeploymentHandle) -> DeploymentHandle:
    """Return a handle whose calls carry small messages, up to 4 MB, in a fraction of the time.

    Arguments and results do not become Ray objects; a replica that dies is `RayActorError` in both cases.
    """
    return handle.options(_by_reference=False)
