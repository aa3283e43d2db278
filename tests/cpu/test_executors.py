"""What child processes are told, and who may shut Ray down."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
from types import SimpleNamespace

import pytest
import torch
from lmdeploy.pytorch.engine.executor import mp_executor, ray_executor
from lmdeploy.pytorch.engine.mp_engine import ray_engine, zmq_engine
from lmdeploy.pytorch.ray import RayContext

import replayssm.cpu
from replayssm import executors
from replayssm.cpu import CpuSettings
from replayssm.executors import ProcessSetup
from replayssm.patching import Patches


def _report(setup: ProcessSetup) -> tuple[bool, int, str]:
    executors.install_setup(setup, world_size=2)
    return replayssm.cpu.is_enabled(), torch.get_num_threads(), torch.zeros(1, device='cuda').device.type


def test_setup_reaches_a_child_process() -> None:
    replayssm.cpu.enable(CpuSettings(threads_per_rank=3))
    setup = executors.current_setup()
    replayssm.cpu.disable()
    assert pickle.loads(pickle.dumps(setup)) == setup == ProcessSetup(cpu=CpuSettings(threads_per_rank=3))
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        assert pool.apply(_report, (setup,)) == (True, 3, 'cpu')


def test_nothing_enabled_is_nothing_to_install() -> None:
    assert executors.current_setup() == ProcessSetup()
    executors.install_setup(ProcessSetup())
    assert not replayssm.cpu.is_enabled()


@pytest.mark.parametrize('order', list(itertools.permutations(range(3))), ids=str)
def test_replacements_last_until_the_last_holder_is_gone(order: tuple[int, ...]) -> None:
    def replaced() -> list[object]:
        return [
            ray_executor.RayWorkerWrapper,
            mp_executor.ExecutorProc,
            ray_engine.RayEngineWorker,
            zmq_engine.ZMQMPEngine._mp_proc,
            RayContext.shutdown,
        ]

    stock = replaced()
    holders = [Patches() for _ in order]
    for holder in holders:
        executors.enable(holder)
    installed = replaced()
    assert all(ours is not theirs for ours, theirs in zip(installed, stock, strict=True))
    for index in order:
        assert replaced() == installed
        holders[index].undo()
    assert replaced() == stock


@pytest.mark.parametrize('owned', [True, False], ids=['own-group', 'given-group'])
def test_given_placement_groups_keep_their_order(owned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ray_executor.RayExecutor,
        '_sort_workers',
        lambda self, driver_ip, workers: workers[::-1],
    )
    patches = Patches()
    executors.enable(patches)
    executor = SimpleNamespace(ray_ctx=SimpleNamespace(owned_pg=owned))
    ordered = ray_executor.RayExecutor._sort_workers(executor, '10.0.0.1', ['rank0', 'rank1'])
    patches.undo()
    assert ordered == (['rank1', 'rank0'] if owned else ['rank0', 'rank1'])
