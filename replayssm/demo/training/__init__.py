"""The demo model that speaks: its corpus, its training with drafts, and its measurements.

`python -m replayssm.demo.training --help` trains; the steps of it are one file each.
"""
