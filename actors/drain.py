"""Stop taking HTTP requests and let those end that are under way; `python -m actors.drain` for a node of a cluster.

Serve's proxies have no such step: `serve.shutdown` kills them with the streams they carry, and a proxy that Serve calls
draining still takes requests. So each one's HTTP server is told here to end as it does by itself: it closes its
listener and the connections that wait for a request, and then waits for those that have one.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import ray
from ray.util import list_named_actors

_NAMESPACE = 'serve'
_PROXY_PREFIX = 'SERVE_PROXY_ACTOR'
_POLL_S = 0.1


def drain_proxies(timeout_s: float, node_id: str = '') -> bool:
    """Drain the proxies of the Ray cluster that this process is connected to.

    Args:
        timeout_s: Seconds that open requests get.
        node_id: Only the proxy of this node; empty: all.

    Returns:
        Whether all requests have ended.
    """
    end_s = time.monotonic() + timeout_s
    names = [actor['name'] for actor in list_named_actors(all_namespaces=True) if actor['namespace'] == _NAMESPACE]
    proxies = [
        ray.get_actor(name, _NAMESPACE) for name in names if name.startswith(_PROXY_PREFIX) and name.endswith(node_id)
    ]
    ray.get([proxy.__ray_call__.remote(_stop_listening) for proxy in proxies], timeout=timeout_s)
    while not all(ray.get([proxy.__ray_call__.remote(_has_ended) for proxy in proxies], timeout=timeout_s)):
        if time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)
    return True


def _stop_listening(proxy: Any) -> None:
    """Run inside a proxy."""
    _, server = proxy._start_http_server_task.result()
    server.should_exit = True


def _has_ended(proxy: Any) -> bool:
    """Run inside a proxy."""
    serving, _ = proxy._start_http_server_task.result()
    return bool(serving.done())


def main() -> int:
    """Drain this node's proxy; returns the exit status."""
    parser = argparse.ArgumentParser(description='Close the HTTP listener of this node and wait for open requests.')
    parser.add_argument('--timeout-s', type=float, default=60.0, help='seconds that open requests get')
    timeout_s: float = parser.parse_args().timeout_s
    ray.init('auto', log_to_driver=False, logging_level='ERROR')
    return 0 if drain_proxies(timeout_s, ray.get_runtime_context().get_node_id()) else 1


if __name__ == '__main__':
    sys.exit(main())
