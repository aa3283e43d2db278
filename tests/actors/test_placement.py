"""Bundles of a tensor-parallel group, and whether they fit."""

from __future__ import annotations

from typing import Any

import pytest

from actors.config import Device
from actors.config_error import ConfigError
from actors.placement import Placement, place, require
from replayssm.config import CPU_RANK_RESOURCE

NODE = {'CPU': 16.0, 'GPU': 8.0, CPU_RANK_RESOURCE: 4.0}


@pytest.mark.parametrize(
    ('device', 'tp', 'expected'),
    [
        pytest.param('cuda', 1, Placement({'CPU': 2, 'GPU': 1}, ({'CPU': 2, 'GPU': 1},)), id='cuda-1'),
        pytest.param('cuda', 4, Placement({'CPU': 2}, ({'CPU': 2}, *({'GPU': 1.0},) * 4)), id='cuda-4'),
        pytest.param('cpu', 1, Placement({'CPU': 2}, ({'CPU': 2},)), id='cpu-1'),
        pytest.param('cpu', 2, Placement({'CPU': 2}, ({'CPU': 2}, *({CPU_RANK_RESOURCE: 1},) * 2)), id='cpu-2'),
    ],
)
def test_bundles(device: Device, tp: int, expected: Placement) -> None:
    assert place(device, tp, num_cpus=2) == expected


@pytest.mark.parametrize(
    ('device', 'tp', 'replicas', 'nodes'),
    [
        pytest.param('cuda', 4, 2, [NODE], id='two-on-one-node'),
        pytest.param('cuda', 8, 2, [NODE, NODE], id='one-per-node'),
        pytest.param('cpu', 4, 1, [NODE], id='cpu-ranks'),
    ],
)
def test_enough_room(device: Device, tp: int, replicas: int, nodes: list[dict[str, float]]) -> None:
    require(place(device, tp, num_cpus=1).bundles, replicas, nodes)


@pytest.mark.parametrize(
    ('device', 'tp', 'replicas', 'nodes', 'message'),
    [
        pytest.param('cuda', 4, 1, [{'CPU': 8.0}], 'need 1 CPU + 4 GPU each on one node, and only 0 fit', id='no-gpu'),
        pytest.param('cuda', 4, 1, [{'CPU': 8.0, 'GPU': 2.0}] * 2, 'only 0 fit', id='gpus-on-two-nodes'),
        pytest.param('cuda', 4, 3, [NODE], 'only 2 fit', id='third-replica'),
        pytest.param('cpu', 2, 1, [{'CPU': 8.0}], f'8 CPU + 0 {CPU_RANK_RESOURCE}', id='no-cpu-ranks'),
        pytest.param('cpu', 1, 1, [], 'no node', id='no-node'),
    ],
)
def test_too_little_room_names_what_is_missing(
    device: Device, tp: int, replicas: int, nodes: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        require(place(device, tp, num_cpus=1).bundles, replicas, nodes)
    assert message in str(caught.value)
    assert 'placement.wait_for_nodes' in str(caught.value)
