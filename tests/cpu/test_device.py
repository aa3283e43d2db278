"""Enabling and disabling the device type, and what "cuda" means meanwhile."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from lmdeploy.messages import PytorchEngineConfig
from torch.utils._device import _device_constructors

import replayssm.cpu
from replayssm.cpu import CpuSettings


@pytest.fixture
def cpu_device() -> Iterator[None]:
    replayssm.cpu.enable()
    yield
    replayssm.cpu.disable()


def _attributes() -> dict[tuple[str, str], Any]:
    """Every attribute of torch and of LMDeploy's modules and classes, without what imports add."""
    owners: dict[str, Any] = {
        'torch': torch,
        'torch.cuda': torch.cuda,
        'torch.Tensor': torch.Tensor,
        'torch.nn.Module': torch.nn.Module,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith('lmdeploy'):
            owners[name] = module
            for attribute, value in vars(module).items():
                if isinstance(value, type) and value.__module__ == name:
                    owners[f'{name}.{attribute}'] = value
    return {
        (owner, attribute): value
        for owner, held in owners.items()
        for attribute, value in vars(held).items()
        if not isinstance(value, ModuleType)
    }


def test_disable_restores_every_attribute() -> None:
    # What enabling imports is imported now, so that it cannot pass for a difference.
    for name in ('executors', *(f'cpu.{module.name}' for module in pkgutil.iter_modules(replayssm.cpu.__path__))):
        importlib.import_module(f'replayssm.{name}')
    before = _attributes()
    replayssm.cpu.enable()
    during = _attributes()
    replayssm.cpu.disable()
    after = _attributes()
    assert during['torch', 'empty'] is not before['torch', 'empty']
    assert before.keys() == after.keys()
    assert {key for key in before if after[key] is not before[key]} == set()


def test_device_contexts_work_meanwhile_and_afterwards() -> None:
    _device_constructors.cache_clear()
    try:
        for switch in (replayssm.cpu.enable, replayssm.cpu.disable):
            switch()
            with torch.device('meta'):
                assert torch.empty(1).is_meta
    finally:
        replayssm.cpu.disable()
        _device_constructors.cache_clear()


def test_enable_is_idempotent(cpu_device: None) -> None:
    empty = torch.empty
    replayssm.cpu.enable()
    assert torch.empty is empty
    assert replayssm.cpu.is_enabled()


def test_other_settings_need_a_restart(cpu_device: None) -> None:
    with pytest.raises(RuntimeError, match='already enabled'):
        replayssm.cpu.enable(CpuSettings(threads_per_rank=3))


def test_threads_are_restored() -> None:
    threads = torch.get_num_threads()
    replayssm.cpu.enable(CpuSettings(threads_per_rank=threads + 1))
    assert torch.get_num_threads() == threads + 1
    replayssm.cpu.disable()
    assert torch.get_num_threads() == threads


def test_refuses_a_process_that_uses_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    with pytest.raises(RuntimeError, match='already initialised'):
        replayssm.cpu.enable()
    assert not replayssm.cpu.is_enabled()


@pytest.mark.parametrize('device', ['cuda', 'cuda:1', torch.device('cuda', 0)], ids=str)
def test_cuda_is_the_cpu(cpu_device: None, device: Any) -> None:
    x = torch.zeros(2, device=device)
    tensors = [
        x,
        x.to(device),
        x.to(device=device),
        x.cuda(),
        x.new_ones(3, device=device),
        torch.arange(3, device=device),
    ]
    tensors += [x.to(torch.cuda.current_device()), torch.nn.Linear(1, 1).to(device).weight]
    assert {tensor.device.type for tensor in tensors} == {'cpu'}


def test_other_devices_keep_their_meaning(cpu_device: None) -> None:
    assert torch.empty(2, device='meta').device.type == 'meta'
    assert torch.empty(2).to('meta').device.type == 'meta'


def test_streams_and_events_have_always_finished(cpu_device: None) -> None:
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        start.record()
        end.record()
    stream.wait_stream(torch.cuda.current_stream())
    assert stream != torch.cuda.current_stream()
    assert end.query()
    assert start.elapsed_time(end) >= 0


def test_free_memory_is_the_budget() -> None:
    replayssm.cpu.enable(CpuSettings(memory_bytes=123 << 20))
    assert torch.cuda.mem_get_info()[0] == 123 << 20
    replayssm.cpu.disable()


def test_engine_config_is_checked_as_ever(cpu_device: None) -> None:
    config = PytorchEngineConfig(device_type='cpu', dtype='float32')
    assert (config.device_type, config.dtype, config.eager_mode) == ('cpu', 'float32', True)
    with pytest.raises(AssertionError, match='invalid tp'):
        PytorchEngineConfig(device_type='cpu', tp=0)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        pytest.param({'distributed_executor_backend': 'mp'}, "use 'ray'", id='mp-executor'),
        pytest.param({'quant_policy': 8}, 'quantise', id='quantised-kv'),
    ],
)
def test_engine_config_refuses(cpu_device: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PytorchEngineConfig(device_type='cpu', **options)


def test_engine_config_without_enable() -> None:
    with pytest.raises(AssertionError, match='device_type'):
        PytorchEngineConfig(device_type='cpu')


@pytest.mark.parametrize(
    ('env', 'expected'),
    [
        pytest.param({}, CpuSettings(), id='default'),
        pytest.param({'REPLAYSSM_CPU_THREADS': '2'}, CpuSettings(threads_per_rank=2), id='threads'),
        pytest.param({'REPLAYSSM_CPU_MEMORY_BYTES': '1024'}, CpuSettings(memory_bytes=1024), id='memory'),
    ],
)
def test_settings_from_env(env: dict[str, str], expected: CpuSettings) -> None:
    assert CpuSettings.from_env(env) == expected


@pytest.mark.parametrize('value', ['', 'two', '0', '-1'])
@pytest.mark.parametrize('name', ['REPLAYSSM_CPU_THREADS', 'REPLAYSSM_CPU_MEMORY_BYTES'])
def test_bad_settings_raise(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=r'expected'):
        CpuSettings.from_env({name: value})


def test_ranks_share_the_cores() -> None:
    assert CpuSettings(threads_per_rank=5).threads(world_size=2) == 5
    assert CpuSettings().threads(world_size=10**6) == 1
