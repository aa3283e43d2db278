"""/metrics over HTTP: every scrape asks the sources, and shows what came back in time."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from actors.messages import RouterStats
from actors.metrics import deployment_families, source_families

logger = logging.getLogger(__name__)

Source = Callable[[], Iterable[Metric]]
"""Returns the families of one source; may block and may raise. Two sources share no family."""

DEFAULT_PORT = 9401
DEFAULT_TIMEOUT_S = 1.0


def start_exporter(
    stats: Callable[[], Coroutine[Any, Any, RouterStats]],
    port: int = DEFAULT_PORT,
    host: str = '127.0.0.1',
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Exporter:
    """Export a deployment's numbers. Call it on the event loop of `stats`.

    Every worker reports its ranks and GPUs to the router, so this one exporter is complete however many nodes there
    are, and a number exists once.

    Args:
        stats: returns all numbers of the moment, as `Router.stats` does; awaited once per scrape.
        port, host, timeout_s: see `Exporter`.
    """
    loop = asyncio.get_running_loop()

    def deployment() -> list[Metric]:
        return deployment_families(asyncio.run_coroutine_threadsafe(stats(), loop).result())

    return Exporter({'deployment': deployment}, port, host, timeout_s)


class Exporter:
    """The HTTP server, from construction to `close`.

    Args:
        sources: by the name that `replayssm_source_up` shows.
        port: 0 takes any free one.
        host: address to listen at.
        timeout_s: what one scrape waits for its sources; the metrics of a slower one are absent.

    Raises:
        OSError: the port is taken; the message says what to change.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        port: int = DEFAULT_PORT,
        host: str = '127.0.0.1',
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        registry = CollectorRegistry()
        registry.register(SourcesCollector(sources, timeout_s))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise OSError(error.errno, f'port {port} of {host}: {error.strerror}; set metrics.port') from error

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class SourcesCollector(Collector):
    """Asks all sources at once and passes on what answers within `timeout_s`."""

    def __init__(self, sources: Mapping[str, Source], timeout_s: float) -> None:
        self._sources = {name: _SourceReader(name, source) for name, source in sources.items()}
        self._timeout_s = timeout_s

    def collect(self) -> Iterator[Metric]:
        """Yield the families of the sources that answered, then `replayssm_source_up` of all."""
        answers = {name: reader.ask() for name, reader in self._sources.items()}
        wait(answers.values(), self._timeout_s)
        up = {}
        for name, answer in answers.items():
            families = self._sources[name].families(answer)
            up[name] = families is not None
            yield from families or ()
        yield from source_families(up)


class _SourceReader:
    """Runs one source on a thread of its own, and never twice at once, however long it hangs."""

    def __init__(self, name: str, source: Source) -> None:
        self._name = name
        self._source = source
        self._lock = threading.Lock()
        self._answer: Future[list[Metric]] | None = None

    def ask(self) -> Future[list[Metric]]:
        """Return the answer under way, or ask anew when there is none."""
        with self._lock:
            if self._answer is None or self._answer.done():
                self._answer = Future()
                threading.Thread(
                    target=self._run, args=(self._answer,), name=f'source {self._name}', daemon=True
                ).start()
            return self._answer

    def families(self, answer: Future[list[Metric]]) -> list[Metric] | None:
        """Return what the source said, None when it failed or is not ready yet."""
        if not answer.done():
            logger.warning('source %s did not answer in time', self._name)
            return None
        error = answer.exception()
        if error is not None:
            logger.warning('source %s failed: %r', self._name, error)
            return None
        return answer.result()

    def _run(self, answer: Future[list[Metric]]) -> None:
        try:
            answer.set_result(list(self._source()))
        except BaseException as error:
            answer.set_exception(error)
