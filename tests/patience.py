"""How long tests wait for what must happen at some time."""

LIVENESS_S = 600.0
"""No test waits for it to pass; it only keeps a test that fails from hanging, on the slowest machine too."""
