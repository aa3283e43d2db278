"""What LMDeploy reads from the environment when it is imported."""

from __future__ import annotations

import os


def set_defaults(float32_states: bool) -> None:
    """Set, unless the user has, what an engine of ours wants; call it before LMDeploy's engine is imported.

    Args:
        float32_states: keep recurrent states in float32, of which stock LMDeploy makes bfloat16.
    """
    # The checker would look for a GPU with torch in a process of its own.
    os.environ.setdefault('LMDEPLOY_ENABLE_CHECK_ENV', '0')
    if float32_states:
        os.environ.setdefault('LMDEPLOY_FP32_MAMBA_SSM_DTYPE', '1')
