"""`python -m tests.helm.deploy`: one node of Ray with the resources of a head and a worker pod serves a Serve config.

Reads `{"config", "head", "worker"}` from standard input: the Serve config and the two `rayStartParams`. Prints what
/ready says as soon as Serve calls the application running, the answer to one request, and the metrics.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

import ray
from ray.serve._private.api import serve_start
from ray.serve.schema import ServeDeploySchema

from actors.ray_start import start_ray
from tests.patience import LIVENESS_S


def custom_resources(params: dict[str, str]) -> dict[str, float]:
    """Return the custom resources in `rayStartParams`, which are quoted for a shell."""
    return dict(json.loads(json.loads(params.get('resources', '"{}"'))))


def fetch(request: str | urllib.request.Request) -> str:
    with urllib.request.urlopen(request, timeout=LIVENESS_S) as response:
        return str(response.read().decode())


def wait_until_running(client: Any, name: str) -> None:
    while True:
        state = client.get_serve_details()['applications'].get(name, {})
        if state.get('status') == 'RUNNING':
            return
        if state.get('status') == 'DEPLOY_FAILED':
            raise RuntimeError(state['message'])
        time.sleep(0.2)


def serve(config: dict[str, Any], head: dict[str, str], worker: dict[str, str]) -> dict[str, str]:
    start_ray(num_cpus=int(worker['num-cpus']), resources=custom_resources(head) | custom_resources(worker))
    client = serve_start(http_options=config['http_options'])
    client.deploy_apps(ServeDeploySchema.model_validate(config))
    (application,) = config['applications']
    wait_until_running(client, application['name'])
    url = f'http://127.0.0.1:{config["http_options"]["port"]}'
    args = application['args']
    ready = fetch(f'{url}/ready')
    body = {'model': args['model']['name'], 'prompt': 'Hello', 'max_tokens': 4}
    request = urllib.request.Request(
        f'{url}/v1/completions', json.dumps(body).encode(), {'content-type': 'application/json'}
    )
    metrics = f'http://127.0.0.1:{args["metrics"]["port"]}/metrics'
    return {'ready': ready, 'answer': fetch(request), 'metrics': fetch(metrics)}


if __name__ == '__main__':
    try:
        print(json.dumps(serve(**json.load(sys.stdin))))
    finally:
        ray.shutdown()
