from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Iterable, Iterator

import pytest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from actors.exporter import Exporter, start_exporter
from actors.messages import RouterStats
from tests.actors import metric_values as values
from tests.patience import LIVENESS_S

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def get(exporter: Exporter, accept: str = 'text/plain') -> str:
    request = urllib.request.Request(f'http://127.0.0.1:{exporter.port}/metrics', headers={'Accept': accept})
    with urllib.request.urlopen(request, timeout=LIVENESS_S) as response:
        body: bytes = response.read()
    return body.decode()


def scrape(exporter: Exporter) -> Samples:
    families = text_string_to_metric_families(get(exporter))
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def up(samples: Samples) -> dict[str, float]:
    return {dict(labels)['source']: value for (name, labels), value in samples.items() if name == 'replayssm_source_up'}


def counter(name: str, value: float = 1) -> list[Metric]:
    return [CounterMetricFamily(name, 'Test.', value)]


@pytest.fixture
def hold() -> Iterator[threading.Event]:
    """An event that sources wait for; set at the end at the latest, so that no thread stays behind."""
    event = threading.Event()
    yield event
    event.set()


def test_every_scrape_asks_the_sources_again() -> None:
    calls = iter(range(1, 10))
    with Exporter({'a': lambda: counter('a_total', next(calls))}, port=0) as exporter:
        assert [scrape(exporter)['a_total', frozenset()] for _ in range(3)] == [1, 2, 3]


def test_a_failing_source_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Iterable[Metric]:
        raise ConnectionError('gone')

    with Exporter({'good': lambda: counter('a_total'), 'bad': fail}, port=0) as exporter:
        samples = scrape(exporter)
    assert up(samples) == {'good': 1, 'bad': 0}
    assert samples['a_total', frozenset()] == 1
    assert "source bad failed: ConnectionError('gone')" in caplog.text


def test_a_source_that_fails_half_way_shows_nothing_of_itself() -> None:
    def fail_half_way() -> Iterator[Metric]:
        yield from counter('a_total')
        raise ConnectionError('gone')

    with Exporter({'bad': fail_half_way}, port=0) as exporter:
        assert set(scrape(exporter)) == {('replayssm_source_up', frozenset({('source', 'bad')}))}


def test_a_source_that_hangs_is_down_until_it_answers_and_is_not_asked_twice(hold: threading.Event) -> None:
    asked = []

    def hang() -> list[Metric]:
        asked.append(threading.get_ident())
        hold.wait()
        return counter('b_total')

    with Exporter({'good': lambda: counter('a_total'), 'slow': hang}, port=0, timeout_s=0.05) as exporter:
        for _ in range(3):
            samples = scrape(exporter)
            assert up(samples) == {'good': 1, 'slow': 0}
            assert ('a_total', frozenset()) in samples
            assert ('b_total', frozenset()) not in samples
        assert len(asked) == 1
        hold.set()
        while up(scrape(exporter))['slow'] == 0:
            pass
        assert scrape(exporter)['b_total', frozenset()] == 1


def test_concurrent_scrapes_share_one_answer(hold: threading.Event) -> None:
    asked = []

    def slow() -> list[Metric]:
        asked.append(threading.get_ident())
        hold.wait()
        return counter('a_total')

    with Exporter({'slow': slow}, port=0, timeout_s=30) as exporter:
        found: list[Samples] = []
        threads = [threading.Thread(target=lambda: found.append(scrape(exporter))) for _ in range(4)]
        for thread in threads:
            thread.start()
        while not asked:
            pass
        hold.set()
        for thread in threads:
            thread.join()
    assert len(found) == 4
    assert all(up(samples) == {'slow': 1} for samples in found)
    assert len(asked) <= 4


def test_close_frees_the_port() -> None:
    exporter = Exporter({}, port=0)
    exporter.close()
    with Exporter({}, port=exporter.port) as second:
        assert second.port == exporter.port


def test_a_port_in_use_is_named() -> None:
    with Exporter({}, port=0) as first, pytest.raises(OSError, match=rf'port {first.port} .*set metrics\.port'):
        Exporter({}, port=first.port)


async def test_a_deployment_is_read_on_its_own_event_loop() -> None:
    loop = asyncio.get_running_loop()

    async def stats() -> RouterStats:
        assert asyncio.get_running_loop() is loop
        return values.router()

    with start_exporter(stats, port=0) as exporter:
        samples = await asyncio.to_thread(scrape, exporter)
    assert up(samples)['deployment'] == 1
    assert samples['replayssm_requests_running', frozenset({('model_name', 'demo')})] == 2


async def test_openmetrics_is_served_to_who_asks_for_it() -> None:
    async def stats() -> RouterStats:
        return values.router()

    with start_exporter(stats, port=0) as exporter:
        text = await asyncio.to_thread(get, exporter, 'application/openmetrics-text; version=1.0.0')
    names = {family.name for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]
    assert {'replayssm_requests_finished', 'replayssm_time_to_first_token_seconds'} <= names
