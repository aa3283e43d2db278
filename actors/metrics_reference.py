"""docs/metrics.md from the metric tables: `python -m actors.metrics_reference docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lmdeploy.messages import ScheduleMetrics
from prometheus_client.core import Metric

from actors.exporter import DEFAULT_PORT
from actors.lmdeploy_metrics import LmdeployMetrics
from actors.metrics import GROUPS

_HEAD = f"""\
# Metrics

Generated from the tables in `actors/metrics.py` and `actors/engine_metrics.py` by `make docs`; do not edit.

The exporter runs beside the router and answers at `/metrics` in Prometheus' text format, on port {DEFAULT_PORT} of the
loopback interface unless `metrics.port` and `metrics.host` say otherwise. It asks its sources at every scrape. Counters
end in `_total` and start again at zero with the process that counts. Times are in seconds, sizes in bytes. What cannot
be measured is absent. Figures of a worker that stopped vanish within `router.worker_timeout_s`.

One exporter serves a deployment however many nodes it spans: every rank, on its own node, puts its counters and its
GPU's memory into the worker's report to the router. There is one port to scrape, and no number exists twice, whatever
the number of ingress replicas.
"""

_LMDEPLOY = """
## LMDeploy

LMDeploy's own figures, `lmdeploy:…` there, with a `replica` label. Those of its HTTP server, which does not run here,
are left out, and so are averages over all time. `lmdeploy_spec_decode_…` exist with speculative decoding only.

Labels: `model_name`, `replica`; `position` for `…_per_pos_total`.

| name | type | meaning |
|---|---|---|
"""


def reference() -> str:
    """Return the page."""
    return _HEAD + ''.join(_group_sections()) + _LMDEPLOY + ''.join(_lmdeploy_rows(_lmdeploy_families()))


def _group_sections() -> Iterator[str]:
    for group in GROUPS:
        labels = ', '.join(f'`{label}`' for label in group.labels)
        yield f'\n## {group.title}\n\nFrom {group.source}.\n\nLabels: {labels}; further ones in the table.\n\n'
        yield '| name | type | labels | meaning |\n|---|---|---|---|\n'
        for spec in group.specs:
            own = ', '.join(f'`{label}`' for label in spec.labels)
            yield f'| `{spec.name}` | {spec.kind} | {own} | {spec.help} |\n'


def _lmdeploy_families() -> tuple[Metric, ...]:
    return LmdeployMetrics('model', session_len=8192, num_drafts=1).families(ScheduleMetrics())


def _lmdeploy_rows(families: Iterable[Metric]) -> Iterator[str]:
    for family in sorted(families, key=lambda family: family.name):
        suffix = '_total' if family.type == 'counter' else ''
        yield f'| `{family.name}{suffix}` | {family.type} | {family.documentation} |\n'


if __name__ == '__main__':
    Path(sys.argv[1]).write_text(reference())
