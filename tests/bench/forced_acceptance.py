"""Verification that accepts a chosen number of drafts, for tests and benchmarks without a deployment."""

from __future__ import annotations

from replayssm.patch.forced_acceptance import accept, install

__all__ = ['accept', 'install']
