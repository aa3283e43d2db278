"""Demo checkpoints: tiny random models of the Qwen3.5 and GLM-5.3-Flash architectures, written on first use."""

from replayssm.demo.checkpoint import CheckpointDtype, ensure, write
from replayssm.demo.specs import SPECS, DemoSpec, Glm5NextSpec

__all__ = ['SPECS', 'CheckpointDtype', 'DemoSpec', 'Glm5NextSpec', 'ensure', 'write']
