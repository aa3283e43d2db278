"""What every rank of an engine computes: logits and chosen tokens, recorded in the process that makes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import ray
import torch
from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent

from replayssm.models.glm5_next import indexer
from replayssm.patching import Patches


class RankRecords(NamedTuple):
    """Of one rank, in the order of its computations.

    Attributes:
        logits: float32 [rows, vocabulary] of every forward.
        scores: what each query of an attention layer thinks of each index pool, float32 [queries, pools]; -inf for
            incomplete ones.
        chosen: which cached tokens it attends to, bool [queries, tokens].
    """

    logits: list[torch.Tensor]
    scores: list[torch.Tensor]
    chosen: list[torch.Tensor]


_records = RankRecords([], [], [])
_patches = Patches()


def start(_: Any = None) -> None:
    """Record in this process from now on; takes the rank's actor, for Ray."""
    stop()

    @_patches.wrap(BaseModelAgent, 'get_logits')
    def get_logits(original: Any, self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = original(self, hidden_states)
        _records.logits.append(logits[0].detach().float().clone())
        return logits

    for owner, name, found in ((indexer, 'score', _records.scores), (indexer.Indexer, 'select', _records.chosen)):
        _record(owner, name, found)


def _record(owner: Any, name: str, found: list[torch.Tensor]) -> None:
    @_patches.wrap(owner, name)
    def compute(original: Any, *args: Any) -> torch.Tensor:
        result: torch.Tensor = original(*args)
        found.append(result.flatten(0, 1).clone())
        return result


def stop(_: Any = None) -> RankRecords:
    """Return what has been recorded in this process, and record no more."""
    _patches.undo()
    found = RankRecords(*(list(values) for values in _records))
    for values in _records:
        values.clear()
    return found


def on_ranks(engine: Any, function: Any) -> list[Any]:
    """Call `start` or `stop` in every rank's process, which is this one without tensor parallelism."""
    workers = getattr(engine.executor, 'workers', None)
    if not workers:
        return [function()]
    results: list[Any] = ray.get([worker.__ray_call__.remote(function) for worker in workers])
    return results
