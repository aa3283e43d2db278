"""A Ray of one's own on this machine."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

logger = logging.getLogger(__name__)

_ATTEMPTS = 4
_TOO_SLOW = 'timed out during startup'
_ENVIRONMENT = {
    # Ray's default is 15: on a machine that does anything else, engine and proxy would get what that leaves.
    'RAY_worker_niceness': '0',
    # Serve kills a proxy that has not started after three times 5 s, and starts another, which is no faster.
    'RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S': '60',
}


def start_ray(**options: Any) -> None:
    """Call `ray.init` for a cluster of this machine alone, without a dashboard.

    Ray gives its processes 15 to 30 seconds to come up, which a laptop that is busy with something else can take just
    for their imports. They are in the page cache the next time. What the environment says of workers' niceness and of
    the time for Serve's proxies is left as it is.

    Args:
        options: What `ray.init` takes besides.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            ray.init('local', include_dashboard=False, log_to_driver=False, **options)
            return
        except Exception as error:
            ray.shutdown()
            if _TOO_SLOW not in str(error) or attempt == _ATTEMPTS:
                raise
            logger.warning('Ray was too slow to start; trying again')
