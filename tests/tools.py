"""Programs that some tests need and Python packages do not bring: a browser, Prometheus, helm."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

_TOOLS_DIR = Path(__file__).parents[1] / '.tools' / 'bin'


def tool(name: str) -> str:
    """Return the path of a program that `make tools` installs.

    Without it the test is skipped with the reason, except in continuous integration, where it fails.
    """
    found = shutil.which(name, path=os.pathsep.join((str(_TOOLS_DIR), os.environ.get('PATH', ''))))
    if found is not None:
        return found
    reason = f'{name} is not installed; `make tools` installs it'
    if os.environ.get('CI') == 'true':
        pytest.fail(reason)
    pytest.skip(reason)
