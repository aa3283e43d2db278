"""Other weights of the same architecture, loaded into a running engine.

LMDeploy rebuilds the modules of an engine that wakes up from level 2 and leaves their weights to `update_params`, which
takes CUDA IPC handles only. Here every rank reads its shard from the checkpoint as it does when it starts.
"""

from __future__ import annotations

from typing import Any

import torch
from lmdeploy.pytorch.engine.executor.base_worker import WorkerWrapperBase
from lmdeploy.pytorch.weight_loader.model_weight_loader import load_model_weights

from replayssm.patching import Patches


def install(patches: Patches) -> None:
    """Give the workers of multi-process executors the method that `load` calls."""
    patches.add(WorkerWrapperBase, 'replay_load', lambda self, folder: _load_rank(self.model_agent, folder))


async def load(engine: Any, folder: str) -> None:
    """See `replayssm.patch.load_weights`."""
    engine.wakeup(['weights'])
    executor = engine.executor
    if hasattr(executor, 'model_agent'):
        _load_rank(executor.model_agent, folder)
    else:
        await executor.collective_rpc_async('replay_load', (folder,))
    engine.wakeup(['kv_cache'])


@torch.inference_mode()
def _load_rank(agent: Any, folder: str) -> None:
    """Fill the empty modules of the rank whose `BaseModelAgent` this is."""
    with agent.all_context():
        load_model_weights(agent.patched_model.get_model(), folder, device=agent.device)
        draft = agent.spec_agent.get_model()
        if draft is not None:
            with agent.spec_agent.draft_context():
                load_model_weights(draft, folder, device=agent.device)
