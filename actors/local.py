"""`python -m actors.local deploy/local.yaml`: Ray and the service on this machine until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import math
import os
import signal
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pynvml
import ray
from ray import serve

from actors.config import AppConfig
from actors.config_error import ConfigError
from actors.drain import drain_proxies
from actors.placement import place, require
from actors.ray_start import start_ray
from actors.serve_file import load
from actors.tls import check_files
from replayssm.config import CPU_RANK_RESOURCE

LOOPBACK = '127.0.0.1'
_POLL_S = 0.5


def main() -> int:
    """Serve one config file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', type=Path, help='Serve config file, such as deploy/local.yaml')
    path: Path = parser.parse_args().config
    try:
        schema, config = load(path)
        application = schema.applications[0]
        if application.deployments:
            raise ConfigError(
                f'{path.name}: deployments: overrides need a cluster of their own; use `serve run {path}`'
            )
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    _stop_on_signals()
    options = schema.http_options.model_dump()
    if 'host' not in schema.http_options.model_fields_set:
        # Serve's own default is every interface of this machine.
        options['host'] = LOOPBACK
    warning = open_door(options['host'], config)
    if warning:
        print(warning, file=sys.stderr)
    url = f'{"https" if options["ssl_certfile"] else "http"}://{options["host"]}:{options["port"]}'
    try:
        with Deployment(
            config, application.name, options, schema.logging_config and schema.logging_config.model_dump()
        ):
            # Ray has put a handler of its own in place, which would leave its processes behind.
            _stop_on_signals()
            wait_until_ready(url)
            print(_welcome(url, config), flush=True)
            threading.Event().wait()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('\nstopped')
    return 0


class Deployment:
    """A Ray of its own with one application on it, as a context manager; also what the tests serve with.

    Args:
        config: The application.
        name: Its name.
        http_options, logging_config: Serve's.
    """

    def __init__(
        self, config: AppConfig, name: str, http_options: dict[str, Any], logging_config: dict[str, Any] | None = None
    ) -> None:
        self._config = config
        self._name = name
        self._http_options = http_options
        self._logging_config = logging_config

    def __enter__(self) -> Deployment:
        # Checked before Ray is up: what cannot work should cost no time.
        _require_free_port(self._http_options['host'], self._http_options['port'])
        check_files(self._http_options)
        resources = ray_resources(self._config, os.cpu_count() or 1)
        _require_gpus(self._config, resources)
        # Not before: it brings LMDeploy, which takes longer to import than all of the above.
        from actors.auth import open_admin_tokens, open_api_keys

        open_api_keys(self._config.api)
        open_admin_tokens(self._config.api)
        print('Starting Ray ...', flush=True)
        start_ray(**resources)
        try:
            from actors.app import build_app

            # Built before Serve starts: where the resources are missing, that is all there is to say.
            app = build_app(self._config)
            print(f'Deploying {self._config.model.name!r} ...', flush=True)
            # A proxy that takes longer than Serve waits for it goes on starting; `wait_until_ready` waits for that.
            with contextlib.suppress(TimeoutError):
                serve.start(http_options=self._http_options, logging_config=self._logging_config)
            try:
                serve.run(app, name=self._name, route_prefix='/')
            except RuntimeError as error:
                raise ConfigError(_reasons(self._name)) from error
        except BaseException:
            ray.shutdown()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # A second signal cuts this short.
        with contextlib.suppress(KeyboardInterrupt):
            if not drain_proxies(self._config.worker.drain_timeout_s):
                print(f'worker.drain_timeout_s: requests are cut off after {self._config.worker.drain_timeout_s:g} s')
        serve.shutdown()
        ray.shutdown()


def ray_resources(config: AppConfig, cpus: int) -> dict[str, Any]:
    """Return arguments of `ray.init` under which the application fits this machine.

    Ray's CPUs are a number to schedule by, so there are enough of them even on a small machine; GPUs are counted by
    Ray itself.
    """
    placement = place(config.engine.device, config.engine.tp, config.worker.num_cpus)
    replicas = config.worker.max_replicas
    wanted = sum(bundle.get('CPU', 0) for bundle in placement.bundles) * replicas
    wanted += config.api.num_cpus * config.api.replicas + 1
    ranks = sum(bundle.get(CPU_RANK_RESOURCE, 0) for bundle in placement.bundles) * replicas
    return {'num_cpus': max(cpus, math.ceil(wanted)), 'resources': {CPU_RANK_RESOURCE: ranks} if ranks else {}}


def count_gpus() -> int:
    """Return how many GPUs NVIDIA's driver has on this machine, whoever may use them."""
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def local_file(config: AppConfig) -> str:
    """Return the file in `deploy/` that serves a small model with the same ranks on the CPU."""
    if config.engine.tp == 1:
        return 'deploy/local.yaml'
    is_glm = config.engine.speculative is not None and config.engine.speculative.method == 'deepseek_mtp'
    return 'deploy/local_glm_tp4.yaml' if is_glm else 'deploy/local_tp4.yaml'


def _require_gpus(config: AppConfig, resources: dict[str, Any]) -> None:
    if config.engine.device != 'cuda':
        return
    gpus = count_gpus()
    node = {'CPU': resources['num_cpus'], 'GPU': gpus, **resources['resources']}
    group = place(config.engine.device, config.engine.tp, config.worker.num_cpus).bundles
    try:
        require(group, config.worker.max_replicas, [node])
    except ConfigError as error:
        has = f'{gpus} NVIDIA GPU(s)' if gpus else 'no NVIDIA GPU'
        raise ConfigError(
            f'{error}. This machine has {has}, see `make doctor`; {local_file(config)} needs none'
        ) from None


def open_door(host: str, config: AppConfig) -> str:
    """Return a warning if everybody who reaches this machine may use the model, else nothing."""
    if config.api.api_keys_file or _is_loopback(host):
        return ''
    return f'http_options.host: got {host!r}; anybody who reaches it may use the model, set api.api_keys_file'


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == 'localhost'


def _require_free_port(host: str, port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(f'http_options.port: got {port}; {error.strerror} on {host}, choose another') from None


def _reasons(application: str) -> str:
    """Return what Serve knows about an application that would not start: of every traceback the last line."""
    deployments = serve.status().applications[application].deployments
    return '\n'.join(
        f'{name}: {status.message.strip().splitlines()[-1]}'
        for name, status in deployments.items()
        if status.status != 'HEALTHY' and status.message.strip()
    )


def wait_until_ready(url: str) -> None:
    """Block until `url`/ready answers 200; the model may take its time.

    Raises:
        ConfigError: No worker is loading any more, and none is ready.
    """
    while True:
        try:
            with urllib.request.urlopen(f'{url}/ready', timeout=10, context=_any_certificate()):
                return
        except urllib.error.HTTPError as error:
            answer = json.load(error)
            if answer['status'] == 'unavailable':
                raise ConfigError(answer['message']) from None
        except (urllib.error.URLError, TimeoutError):
            pass
        time.sleep(_POLL_S)


def _any_certificate() -> ssl.SSLContext:
    """Return how to talk to our own server, by an address that its certificate need not name."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _stop_on_signals() -> None:
    """End as after Ctrl-C however it is told to; a shell starts background jobs with SIGINT ignored."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _welcome(url: str, config: AppConfig) -> str:
    body = f'{{"model": "{config.model.name}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}'
    key = ' -H "Authorization: Bearer $API_KEY"' if config.api.api_keys_file else ''
    command = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    return f'\nReady at {url}\n\n  {command}\n'


if __name__ == '__main__':
    sys.exit(main())
