"""Start a new sequence from a zero state on CUDA, without LMDeploy's reset gate.

LMDeploy makes a prefill forget what an earlier owner left in the slot by giving a sequence's first token the log-space
gate -1e6. The chunked kernel sums gates in float32 and uses differences of the sums; next to 1e6 they are multiples of
1/16, so all decays among the first 64 tokens of every prompt are rounded to steps of about 6 %. A zero initial state
means the same and costs nothing: the operator gathers initial states into a tensor of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from lmdeploy.pytorch.backends.cuda.gated_delta_rule import CudaGatedDeltaRuleImpl

from replayssm.patch.recurrent import Operands
from replayssm.patching import Patches


def install(patches: Patches) -> None:
    """Patch stock prefill of the CUDA operator; ReplaySSM's starts from zeros by itself and never uses the gate."""

    @patches.wrap(CudaGatedDeltaRuleImpl, '__init__')
    def init(original: Any, self: Any) -> None:
        original(self)
        chunk = self.chunk_func

        def chunk_from_fresh_states(*args: Any, initial_state: torch.Tensor, **options: Any) -> Any:
            if self.fresh_sequences is not None:
                initial_state.masked_fill_(self.fresh_sequences[:, None, None, None], 0)
            return chunk(*args, initial_state=initial_state, **options)

        self.chunk_func = chunk_from_fresh_states

    @patches.wrap(CudaGatedDeltaRuleImpl, 'prefill')
    def prefill(original: Any, self: Any, *args: Any) -> torch.Tensor:
        meta = Operands(*args).gated_delta_meta
        self.fresh_sequences = meta.is_init if getattr(meta, 'replay', None) is None else None
        meta.is_init_token = None
        out: torch.Tensor = original(self, *args)
        return out
