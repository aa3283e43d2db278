"""Demo models: a trained one that comes with this package, and tiny ones with random weights, made on first use."""

from replayssm.demo.checkpoint import CheckpointDtype, ensure, names, write
from replayssm.demo.specs import SPECS, DemoSpec, Glm5NextSpec
from replayssm.demo.trained import TRAINED

__all__ = ['SPECS', 'TRAINED', 'CheckpointDtype', 'DemoSpec', 'Glm5NextSpec', 'ensure', 'names', 'write']
