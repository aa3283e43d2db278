"""Kimi Delta Attention: a gate per value head and key channel."""
