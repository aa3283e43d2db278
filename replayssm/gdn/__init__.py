"""Gated DeltaNet: a scalar gate per value head."""
