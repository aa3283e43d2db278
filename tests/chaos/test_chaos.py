"""A short run of `make chaos`: what clients saw, and what was left behind."""

from __future__ import annotations

import pytest

from tests.chaos.__main__ import run_chaos

DURATION_S = 45.0


@pytest.mark.soak
def test_nothing_wrong_hung_or_leaked() -> None:
    result = run_chaos(DURATION_S, period_s=8.0)
    assert result['violations'] == {}, result['examples']
    assert set(result['faults']) == {'worker', 'router'}
    assert set(result['requests']) == {'whole', 'stream', 'disconnect', 'stop'}
