"""The exporter's numbers of a real engine under real requests."""

from __future__ import annotations

import asyncio
import urllib.request

from openai import AsyncOpenAI
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from actors.exporter import start_exporter
from replayssm import demo
from replayssm.plan import PlanOptions, load_shape, make_plan
from tests.actors.service.conftest import MODEL, RUNNING, Service
from tests.actors.service.requests import ask
from tests.patience import LIVENESS_S

TOKENS = 100


async def scrape(service: Service) -> dict[str, Metric]:
    def get(port: int) -> str:
        with urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics', timeout=LIVENESS_S) as response:
            body: bytes = response.read()
        return body.decode()

    with start_exporter(service.stats, port=0, timeout_s=LIVENESS_S) as exporter:
        text = await asyncio.to_thread(get, exporter.port)
    return {family.name: family for family in text_string_to_metric_families(text)}


def total(families: dict[str, Metric], family: str, suffix: str = '', **labels: str) -> float:
    """Sum the samples of `family` + `suffix` that have `labels`."""
    samples = [
        sample
        for sample in families[family].samples
        if sample.name == family + suffix and labels.items() <= sample.labels.items()
    ]
    assert samples, (family, suffix, labels)
    return sum(sample.value for sample in samples)


async def test_counters_follow_the_requests(service: Service, client: AsyncOpenAI) -> None:
    before = await scrape(service)
    answer = await ask(client, 'hello', TOKENS)
    await service.until_idle()
    after = await scrape(service)

    def grown(family: str, suffix: str = '_total', **labels: str) -> float:
        return total(after, family, suffix, **labels) - total(before, family, suffix, **labels)

    assert grown('replayssm_requests_admitted') == 1
    assert grown('replayssm_requests_finished', reason='length') == 1
    assert grown('replayssm_prompt_tokens') == answer.prompt_tokens
    assert grown('replayssm_generation_tokens') == TOKENS
    for histogram in ('time_to_first_token', 'time_per_output_token', 'e2e_request_latency'):
        assert grown(f'replayssm_{histogram}_seconds', '_count') == 1
        assert grown(f'replayssm_{histogram}_seconds', '_sum') > 0
    # Every record but the rejected ones is a token of the history that decode steps appended. The last window, and
    # those of forwards that were sent before the engine saw the end, are never rejected.
    kept = grown('replayssm_records') - grown('replayssm_rejected_records')
    assert TOKENS - 1 <= kept <= TOKENS + 5 * 4
    assert 0 < grown('replayssm_flushes') <= grown('replayssm_decode_steps')
    assert grown('lmdeploy_generation_tokens') == TOKENS
    assert grown('lmdeploy_spec_decode_num_drafts') > 0


async def test_state_memory_is_what_the_plan_says(service: Service, client: AsyncOpenAI) -> None:
    families = await scrape(service)
    plan = make_plan(load_shape(str(demo.ensure('tiny'))), PlanOptions(num_drafts=3, max_batch_size=RUNNING))
    for kind, size in plan.replay_slot_bytes.items():
        assert total(families, 'replayssm_state_bytes', kind=kind) == plan.slots * size
    assert total(families, 'replayssm_state_stock_bytes') == plan.stock_bytes


async def test_every_series_names_its_model(service: Service, client: AsyncOpenAI) -> None:
    families = await scrape(service)
    del families['replayssm_source_up']
    assert {sample.labels['model_name'] for family in families.values() for sample in family.samples} == {MODEL}
