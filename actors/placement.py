"""Which resources a worker's tensor-parallel group takes, and whether a cluster can give them; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.config import Device
from actors.config_error import ConfigError
from replayssm.config import CPU_RANK_RESOURCE

Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one worker goes: the replica sits in the first bundle, rank i in bundle i + 1 where ranks are actors.

    Attributes:
        replica: Resources of the replica itself.
        bundles: The placement group, whole on one node.
    """

    replica: Bundle
    bundles: tuple[Bundle, ...]


def place(device: Device, tp: int, num_cpus: float) -> Placement:
    """Return the placement of one tensor-parallel group.

    A single rank runs inside the replica, which then holds the GPU. Several ranks are actors of their own; the
    replica takes no GPU then, because LMDeploy's executor gives its ranks the bundles that have one.
    """
    rank = 'GPU' if device == 'cuda' else CPU_RANK_RESOURCE
    head: Bundle = {'CPU': num_cpus}
    if tp > 1:
        return Placement(head, (head, *({rank: 1.0} for _ in range(tp))))
    if device == 'cuda':
        head[rank] = 1.0
    return Placement(head, (head,))


def require(group: Sequence[Bundle], replicas: int, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that `replicas` groups fit the nodes, each group whole on one node.

    Args:
        group: The bundles of one group.
        replicas: Groups wanted.
        nodes: Total resources of every node that is alive.

    Raises:
        ConfigError: They do not fit; the message says what is wanted, what there is and what to do.
    """
    need: Counter[str] = Counter()
    for bundle in group:
        need.update(bundle)
    room = sum(min(int(node.get(name, 0) // amount) for name, amount in need.items()) for node in nodes)
    if room < replicas:
        have = '; '.join(_show({name: node.get(name, 0) for name in need}) for node in nodes) or 'no node'
        raise ConfigError(
            f'worker.replicas: {replicas} group(s) need {_show(need)} each on one node, and only {room} fit; '
            f'the nodes have: {have}. Lower engine.tp, worker.replicas or worker.autoscaling.max_replicas, add nodes, '
            'or set placement.wait_for_nodes where a cluster autoscaler will add them'
        )


def _show(resources: Mapping[str, float]) -> str:
    return ' + '.join(f'{amount:g} {name}' for name, amount in resources.items())
