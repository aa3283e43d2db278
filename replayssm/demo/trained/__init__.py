"""Checkpoints that were trained and come with this package, a folder each; `replayssm.demo.training` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

TRAINED: Mapping[str, Path] = MappingProxyType({'small': Path(__file__).with_name('small')})
"""Folder of each by name. They are read, never written."""
