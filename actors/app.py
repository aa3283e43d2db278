"""The Serve application: deployments, their options and how they are wired."""
# No `from __future__ import annotations` here: Serve looks for the class itself in `build_app`'s signature, and
# passes a raw dict when it finds a string.

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from actors.api import Api
from actors.config import AppConfig, AutoscalingOptions
from actors.pinned import PinnedRequestRouter
from actors.placement import place, require
from actors.router import Router
from actors.worker import Worker

_LOOK_BACK_S = 15.0
"""Time that a worker's demand is averaged over; longer than the ten seconds between two of Serve's collections."""
_UNLIMITED = 100_000
"""Requests that Serve lets into one replica: the router alone decides who waits."""


def build_app(args: AppConfig) -> Application:
    """Build the application from its `args`.

    Raises:
        ConfigError: The cluster cannot hold the workers.
    """
    placement = place(args.engine.device, args.engine.tp, args.worker.num_cpus)
    if not args.placement.wait_for_nodes:
        nodes = [node['Resources'] for node in ray.nodes() if node['Alive']]
        require(placement.bundles, args.worker.max_replicas, nodes)

    router = serve.deployment(Router).options(
        num_replicas=1,
        max_ongoing_requests=_UNLIMITED,
        health_check_period_s=2,
        ray_actor_options={'num_cpus': 0.1},
    )
    router_handle = router.bind(args)
    workers = _worker_deployment(args, placement.replica, list(placement.bundles)).bind(args, router_handle)
    api = serve.deployment(serve.ingress()(Api)).options(
        name='Api',
        num_replicas=args.api.replicas,
        max_ongoing_requests=_UNLIMITED,
        graceful_shutdown_timeout_s=args.worker.drain_timeout_s,
        ray_actor_options={'num_cpus': args.api.num_cpus},
    )
    return api.bind(args, router_handle, workers)


def _worker_deployment(args: AppConfig, replica: dict[str, float], bundles: list[dict[str, float]]) -> Any:
    options = args.worker
    return serve.deployment(Worker).options(
        num_replicas=options.replicas if options.autoscaling is None else 'auto',
        autoscaling_config=_autoscaling(options.autoscaling),
        max_ongoing_requests=_UNLIMITED,
        health_check_period_s=options.health_check_period_s,
        health_check_timeout_s=options.health_check_timeout_s,
        graceful_shutdown_timeout_s=options.drain_timeout_s,
        ray_actor_options={'num_cpus': replica['CPU'], 'num_gpus': replica.get('GPU', 0)},
        placement_group_bundles=bundles,
        placement_group_strategy='STRICT_PACK',
        request_router_config=RequestRouterConfig(request_router_class=PinnedRequestRouter),
    )


def _autoscaling(options: AutoscalingOptions | None) -> AutoscalingConfig | None:
    if options is None:
        return None
    return AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas,
        upscale_delay_s=options.upscale_delay_s,
        downscale_delay_s=options.downscale_delay_s,
        look_back_period_s=_LOOK_BACK_S,
        policy=AutoscalingPolicy(
            policy_function='actors.autoscaling:PressurePolicy',
            policy_kwargs={'target_pressure': options.target_pressure},
        ),
    )
