"""`python -m helm`: write the chart's values.schema.json and the table of its README again."""

from __future__ import annotations

from helm.readme import readme
from helm.schema import schema
from helm.values import CHART

(CHART / 'values.schema.json').write_text(schema())
_README = CHART / 'README.md'
_README.write_text(readme(_README.read_text()))
