"""Rules as promtool judges them, with a firing and a quiet case of every alert."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.observability.conftest import ROOT, RULES
from tests.observability.expressions import rules
from tests.tools import tool

CASES = RULES.with_name('rules_test.yaml')
ALERTS = {rule['alert']: rule for rule in rules() if 'alert' in rule}


@pytest.mark.parametrize('command', [('check', 'rules', RULES.name), ('test', 'rules', CASES.name)], ids=' '.join)
def test_promtool_is_content(command: tuple[str, ...]) -> None:
    done = subprocess.run([tool('promtool'), *command], cwd=RULES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    checks = [check for case in yaml.safe_load(CASES.read_text())['tests'] for check in case['alert_rule_test']]
    assert {check['alertname'] for check in checks if check['exp_alerts']} == set(ALERTS)
    assert {check['alertname'] for check in checks if not check['exp_alerts']} == set(ALERTS)


@pytest.mark.parametrize('alert', ALERTS)
def test_every_alert_says_how_bad_it_is_and_what_to_do(alert: str) -> None:
    rule: dict[str, Any] = ALERTS[alert]
    assert rule['labels']['severity'] in {'critical', 'warning', 'info'}
    assert set(rule['annotations']) == {'summary', 'runbook_url'}
    page, _, anchor = rule['annotations']['runbook_url'].partition('#')
    assert page == 'docs/en/runbooks.md'
    assert anchor == alert.lower()
    for language in ('en', 'zh'):
        headings = re.findall(r'^## (\w+)$', (ROOT / f'docs/{language}/runbooks.md').read_text(), re.M)
        assert alert in headings
        assert set(headings) == set(ALERTS)
