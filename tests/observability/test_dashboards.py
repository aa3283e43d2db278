"""What is committed is what the code makes, and every panel says what it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana.generate import CHART_FILES, generated
from tests.observability.conftest import ROOT
from tests.observability.expressions import DASHBOARDS, panels

FILES = generated(ROOT)


@pytest.mark.parametrize('name', FILES)
def test_generated_files_are_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text() == FILES[name], 'run `make dashboards`'


def test_nothing_else_lies_beside_them() -> None:
    folders = (ROOT / 'deploy/grafana/dashboards', ROOT / CHART_FILES / 'dashboards')
    assert {str(path.relative_to(ROOT)) for folder in folders for path in folder.iterdir()} <= set(FILES)


@pytest.mark.parametrize('path', DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_explains_itself(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    ids = [panel['id'] for panel in dashboard['panels']]
    assert len(set(ids)) == len(ids)
    for panel in panels(dashboard):
        assert panel['title']
        assert re.fullmatch(r'[A-Z0-9`(].*\.', panel['description']), panel['title']
        assert panel['fieldConfig']['defaults']['unit'], panel['title']
        assert all('$model_name' in target['expr'] for target in panel['targets']), panel['title']


@pytest.mark.parametrize('path', DASHBOARDS, ids=lambda path: path.stem)
def test_every_dashboard_asks_for_its_data_source_and_links_to_a_page(path: Path) -> None:
    dashboard: dict[str, Any] = json.loads(path.read_text())
    variables = {variable['name']: variable for variable in dashboard['templating']['list']}
    assert list(variables) == ['datasource', 'model_name', 'replica', 'docs']
    for panel in panels(dashboard):
        assert panel['datasource'] == {'type': 'prometheus', 'uid': '${datasource}'}
    pages = [link['url'].removeprefix('${docs}/') for link in dashboard['links'] if link['type'] == 'link']
    assert len(pages) == 2
    for page in pages:
        file, _, anchor = page.partition('#')
        text = (ROOT / 'docs' / file).read_text()
        headings = [
            re.sub(r'[^a-z0-9 -]', '', h.lower()).replace(' ', '-') for h in re.findall(r'^#+ (.*)$', text, re.M)
        ]
        assert not anchor or anchor in headings
