"""A metric as a row of a table: its name, kind, help and labels, and how its values are read from an object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from actors.messages import Histogram

T = TypeVar('T')
Labels = tuple[str, ...]
Readings = Iterable[tuple[Labels, float | Histogram]]


@dataclass(frozen=True, slots=True)
class MetricSpec(Generic[T]):
    """One metric.

    Attributes:
        name: as exposed; that of a counter ends in `_total`.
        labels: label names beside those of the group.
        read: values of one object with their label values, in the order of `labels`.
    """

    name: str
    kind: Literal['gauge', 'counter', 'histogram']
    help: str
    read: Callable[[T], Readings]
    labels: Labels = ()

    def __post_init__(self) -> None:
        if (self.kind == 'counter') != self.name.endswith('_total'):
            raise ValueError(f'name: a counter, and nothing else, ends in _total; got {self.kind} {self.name!r}')


@dataclass(frozen=True, slots=True)
class MetricGroup(Generic[T]):
    """Metrics that are read from objects of one type and share their first labels.

    Attributes:
        title, source: heading of the reference page, and where the numbers come from.
    """

    title: str
    source: str
    labels: Labels
    specs: tuple[MetricSpec[T], ...]

    def families(self, objects: Sequence[tuple[Labels, T]]) -> list[Metric]:
        """Return one family per metric that has a value; `objects` pairs values of `labels` with what to read."""
        families = []
        for spec in self.specs:
            family = _FAMILY[spec.kind](spec.name, spec.help, labels=(*self.labels, *spec.labels))
            for base, item in objects:
                for labels, value in spec.read(item):
                    _add(family, (*base, *labels), value)
            if family.samples:
                families.append(family)
        return families


_FAMILY: Mapping[str, Any] = {
    'gauge': GaugeMetricFamily,
    'counter': CounterMetricFamily,
    'histogram': HistogramMetricFamily,
}


def _add(family: Any, labels: Labels, value: float | Histogram) -> None:
    if isinstance(value, Histogram):
        bounds = (*map(floatToGoString, value.bounds), '+Inf')
        family.add_metric(labels, list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
    else:
        family.add_metric(labels, value)


def one(read: Callable[[T], float | Histogram | None]) -> Callable[[T], Readings]:
    """Read one value without further labels; None is no value."""

    def readings(item: T) -> Readings:
        value = read(item)
        return () if value is None else (((), value),)

    return readings


def each(read: Callable[[T], Mapping[Any, float]], known: Any = None) -> Callable[[T], Readings]:
    """Read a mapping from label value to number; `known` is a `Literal` whose values start at zero."""
    zeros = dict.fromkeys(get_args(known), 0)

    def readings(item: T) -> Readings:
        return (((str(label),), value) for label, value in {**zeros, **read(item)}.items())

    return readings
