"""A real Prometheus on a real deployment under load: every expression has data, and an alert comes and goes."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping

import ray
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.util import list_named_actors

from actors.local import wait_until_ready
from tests.observability.conftest import GPU_MODEL, MODEL, RUNNING, Service
from tests.observability.expressions import Expression, panel_expressions, rule_expressions
from tests.observability.load import ask, client, load
from tests.observability.prometheus import Prometheus
from tests.patience import LIVENESS_S
from tests.tools import tool

ALERT = 'ReplaySSMNoWorkerReady'


def scrape(service: Service) -> str:
    with urllib.request.urlopen(service.metrics_url, timeout=LIVENESS_S) as response:
        body: bytes = response.read()
    return body.decode()


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def total(found: Mapping[str, Metric], name: str, **labels: str) -> float:
    """Sum the samples `name`, with these labels."""
    family = found[re.sub(r'_(total|count|sum)$', '', name)]
    samples = [s for s in family.samples if s.name == name and labels.items() <= s.labels.items()]
    assert samples, (name, labels)
    return sum(sample.value for sample in samples)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.5)


async def idle_scrape(service: Service) -> str:
    """Return a scrape from when no request runs and the engine has reported so."""
    texts = []

    def idle() -> bool:
        texts.append(scrape(service))
        found = families(texts[-1])
        names = ('replayssm_requests_running', 'replayssm_requests_queued', 'replayssm_sequences_running')
        return all(name in found and total(found, name) == 0 for name in names)

    await until(idle)
    return texts[-1]


async def test_two_ingress_replicas_count_every_request_once(service: Service) -> None:
    assert serve.status().applications['test'].deployments['Api'].replica_states == {'RUNNING': 2}
    before = families(await idle_scrape(service))
    requests = 12
    gate = asyncio.Semaphore(RUNNING)
    async with client(service) as http:

        async def one(number: int) -> dict[str, int] | None:
            async with gate:
                return await ask(http, f'number {number}', 5)

        usages = await asyncio.gather(*(one(number) for number in range(requests)))
    assert all(usages)
    after = families(await idle_scrape(service))

    def grown(name: str) -> float:
        return total(after, name) - total(before, name)

    assert grown('replayssm_requests_admitted_total') == requests
    assert grown('replayssm_requests_finished_total') == requests
    assert grown('replayssm_e2e_request_latency_seconds_count') == requests
    assert grown('replayssm_generation_tokens_total') == requests * 5
    assert grown('replayssm_prompt_tokens_total') == sum(usage['prompt_tokens'] for usage in usages if usage)
    assert total(after, 'replayssm_worker_capacity') == RUNNING
    assert {s.labels['rank'] for s in after['replayssm_state_stock_bytes'].samples} == {'0'}


async def test_counters_are_declared_as_such(service: Service) -> None:
    text = await idle_scrape(service)
    declared = dict(re.findall(r'^# TYPE (\S+) (\S+)$', text, re.M))
    assert {'counter', 'gauge', 'histogram'} == set(declared.values())
    for name, kind in declared.items():
        assert (kind == 'counter') == name.endswith('_total'), (name, kind)
    ours = '\n'.join(line for line in text.splitlines() if 'replayssm_' in line) + '\n'
    command = [tool('promtool'), 'check', 'metrics']
    linted = subprocess.run(command, input=ours, capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, '', '')


async def test_every_panel_and_rule_has_data(service: Service, prometheus: Prometheus) -> None:
    expressions = [*panel_expressions(), *rule_expressions()]
    assert len(expressions) > 80

    def without_data(candidates: Iterable[Expression]) -> list[Expression]:
        return [expression for expression in candidates if not prometheus.query(expression.promql)]

    missing = expressions
    async with load(service):
        try:
            async with asyncio.timeout(LIVENESS_S):
                while missing := await asyncio.to_thread(without_data, missing):
                    await asyncio.sleep(1)
        except TimeoutError:
            assert missing == []


async def test_variables_of_dashboards_have_values(service: Service, prometheus: Prometheus) -> None:
    def values(label: str, metric: str) -> set[str]:
        return set(prometheus.get(f'label/{label}/values', **{'match[]': metric}))

    await until(lambda: values('model_name', 'replayssm_requests_running') == {MODEL, GPU_MODEL})
    assert values('replica', f'replayssm_worker_capacity{{model_name=~"{MODEL}"}}')


async def test_a_worker_that_dies_leaves_no_series_and_raises_an_alert_until_it_is_replaced(
    service: Service, prometheus: Prometheus
) -> None:
    def replicas() -> set[str]:
        return {labels['replica'] for labels, _ in prometheus.query(f'{{model_name="{MODEL}", replica!=""}}')}

    def firing() -> bool:
        alerts = prometheus.get('alerts')['alerts']
        return any(a['labels']['alertname'] == ALERT and a['state'] == 'firing' for a in alerts)

    await until(lambda: len(replicas()) == 1 and not firing())
    (old,) = replicas()
    _kill_worker()
    killed_s = time.monotonic()

    def has_fired() -> bool:
        # Asked of the past too, in case that the new worker is ready before we look.
        alert = f'ALERTS{{alertname="{ALERT}", alertstate="firing", model_name="{MODEL}"}}'
        return bool(prometheus.query(f'max_over_time({alert}[{math.ceil(time.monotonic() - killed_s)}s])'))

    async with client(service) as http:
        # The router learns of the death from the next request, sooner than from the silence.
        request = asyncio.create_task(ask(http, 'anybody there?', 4))
        await until(has_fired)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await asyncio.to_thread(wait_until_ready, service.url)
    await until(lambda: not firing() and len(replicas()) == 1 and old not in replicas())
    assert f'replica="{old}"' not in scrape(service)


def _kill_worker() -> None:
    (name,) = [actor['name'] for actor in list_named_actors(all_namespaces=True) if '#Worker#' in actor['name']]
    ray.kill(ray.get_actor(name, 'serve'))
