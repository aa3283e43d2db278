"""Serve's side of a lease: the request goes to the replica that the router chose, or fails.

Serve ships this module by value: a class defined here is another one than what the ingress imports.
"""

from __future__ import annotations

import time

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from actors.messages import WorkerGone

_UNKNOWN_FOR_S = 2.0
"""How long a chosen replica may be unknown here: the router can hear of a new one before Serve tells its handles."""


class PinnedRequestRouter(RequestRouter):
    """Send a call whose first argument has a `worker_id` to that worker and to nobody else; other calls to anyone."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the one replica that may run the request."""
        first = pending_request.args[0] if pending_request is not None and pending_request.args else None
        worker_id = getattr(first, 'worker_id', None)
        if pending_request is None or worker_id is None:
            return [candidate_replicas]
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == worker_id:
                return [[replica]]
        if time.time() - pending_request.created_at < _UNKNOWN_FOR_S:
            return []  # Serve asks again, less and less often
        if not pending_request.future.done():
            pending_request.future.set_exception(WorkerGone(f'worker {worker_id} is gone'))
        # Serve looks at the future only when it is offered a replica.
        return [candidate_replicas]
