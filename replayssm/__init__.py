"""ReplaySSM for LMDeploy: a checkpoint state and a ring of recent inputs instead of a state rewritten every token."""

__version__ = '0.1.0'
