"""What goes wrong: workers, ranks and the router are killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import psutil
import ray
from ray.util import list_named_actors

RANK_PROCESS = 'RayRank'


def kill_replica(deployment: str, chooser: random.Random) -> bool:
    """Kill a replica of a deployment; tell whether there was one."""
    mark = f'#{deployment}#'
    names = [actor['name'] for actor in list_named_actors(all_namespaces=True) if mark in actor['name']]
    if not names:
        return False
    with contextlib.suppress(ValueError):  # it has just gone by itself
        ray.kill(ray.get_actor(chooser.choice(names), 'serve'))
    return True


def kill_rank(chooser: random.Random) -> bool:
    """Kill the process of a tensor-parallel rank of this session; tell whether there was one."""
    ours = psutil.Process().children(recursive=True)
    ranks = [process for process in ours if RANK_PROCESS in _title(process)]
    if not ranks:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        chooser.choice(ranks).kill()
    return True


def _title(process: psutil.Process) -> str:
    try:
        return ' '.join(process.cmdline())
    except psutil.Error:
        return ''


class Faults:
    """Brings about a random fault now and then.

    Args:
        period_s: Mean time between two faults.
        with_ranks: Whether ranks are processes of their own.
    """

    def __init__(self, period_s: float, with_ranks: bool, seed: int) -> None:
        self._period_s = period_s
        self._random = random.Random(seed)
        self._kinds = {
            'worker': lambda: kill_replica('Worker', self._random),
            'router': lambda: kill_replica('Router', self._random),
        }
        if with_ranks:
            self._kinds['rank'] = lambda: kill_rank(self._random)
        self.counts: Counter[str] = Counter()

    async def run(self, until: asyncio.Event) -> None:
        """Work until told to stop. Every kind comes once before the choice is random."""
        due = list(self._kinds)
        while not until.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), self._random.uniform(0.5, 1.5) * self._period_s)
                return
            kind = due.pop() if due else self._random.choice(list(self._kinds))
            if await asyncio.to_thread(self._kinds[kind]):
                self.counts[kind] += 1
            else:
                due.append(kind)
