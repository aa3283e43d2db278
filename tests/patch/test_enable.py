"""`replayssm.patch.enable` and `disable`: explicit, idempotent, reversible, and a clear no to what is not supported."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lmdeploy
import pytest
from lmdeploy.messages import PytorchEngineConfig, SpeculativeConfig
from lmdeploy.pytorch.config import DistConfig, ModelConfig
from lmdeploy.pytorch.disagg.config import EngineRole
from lmdeploy.pytorch.engine.engine import Engine

import replayssm.cpu
from replayssm import demo, patch
from replayssm.config import ReplayConfig
from replayssm.patch import Fixes, Settings
from replayssm.patching import Patches


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    patch.disable()
    replayssm.cpu.disable()


def lmdeploy_attributes() -> dict[tuple[str, str], Any]:
    """Every attribute of every class and module of LMDeploy that is loaded."""
    attributes = {}
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith('lmdeploy'):
            continue
        for key, value in list(vars(module).items()):
            attributes[name, key] = value
            if inspect.isclass(value) and value.__module__ == name:
                attributes |= {(f'{name}.{key}', k): v for k, v in vars(value).items() if not k.startswith('_abc_')}
    return attributes


def test_disable_restores_every_attribute() -> None:
    patch.enable(ReplayConfig())
    patch.disable()
    before = lmdeploy_attributes()
    patch.enable(ReplayConfig())
    changed = {k for k, v in lmdeploy_attributes().items() if before.get(k) is not v}
    assert len(changed) > 10
    patch.disable()
    after = lmdeploy_attributes()
    assert {k for k in before.keys() | after.keys() if before.get(k) is not after.get(k)} == set()


def test_enabling_twice_wraps_once() -> None:
    patch.enable(ReplayConfig())
    first = Engine.from_pretrained
    patch.enable(Settings(ReplayConfig()))
    assert Engine.from_pretrained is first
    assert patch.current() == Settings(ReplayConfig())


def test_new_settings_take_the_place_of_the_old() -> None:
    patch.enable(ReplayConfig(8))
    patch.enable(Settings(None))
    assert patch.current() == Settings(None)
    patch.disable()
    assert patch.current() is None


def test_settings_travel_to_worker_processes() -> None:
    settings = Settings(ReplayConfig(8), Fixes(conv_tail=False))
    assert pickle.loads(pickle.dumps(settings)) == copy.deepcopy(settings) == settings


def test_an_unknown_version_is_refused_and_nothing_stays_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdeploy, '__version__', '0.19.0')
    with pytest.raises(RuntimeError, match=r'expected version 0\.18\.0, got 0\.19\.0; install lmdeploy==0\.18\.0'):
        patch.enable(ReplayConfig())
    assert patch.current() is None
    assert ModelConfig.from_hf_config.__module__ == 'lmdeploy.pytorch.config'


def test_replay_needs_the_continuation_fix() -> None:
    with pytest.raises(ValueError, match=r'fixes\.continuation: expected True with ReplaySSM enabled, got False'):
        Settings(ReplayConfig(), Fixes(continuation=False))


def test_the_continuation_fix_needs_the_mrope_fix() -> None:
    with pytest.raises(ValueError, match=r'fixes\.mrope: expected True with fixes\.continuation, got False'):
        Settings(fixes=Fixes(mrope=False))
    assert not Settings(fixes=Fixes(continuation=False, mrope=False)).fixes.mrope


@pytest.mark.parametrize(
    ('options', 'drafts', 'message'),
    [
        ({'dp': 2, 'tp': 2}, None, r'dp=2 is not supported with ReplaySSM'),
        ({'role': EngineRole.Prefill}, None, 'role=Prefill is not supported'),
        ({'enable_microbatch': True}, None, 'enable_microbatch=True is not supported'),
        ({'enable_mp_engine': True}, None, 'enable_mp_engine=True is not supported'),
        ({}, SpeculativeConfig('dflash'), r"speculative method 'dflash' .*supported: qwen3_5_mtp, deepseek_mtp"),
    ],
    ids=['dp', 'role', 'microbatch', 'mp-engine', 'dflash'],
)
def test_unsupported_engine_options_are_refused_at_start(options: dict[str, Any], drafts: Any, message: str) -> None:
    patch.enable(ReplayConfig())
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained('nowhere', engine_config=PytorchEngineConfig(**options), speculative_config=drafts)


def test_models_without_a_replay_kernel_are_refused_by_name() -> None:
    patch.enable(ReplayConfig())
    with pytest.raises(
        ValueError, match=r"model type 'llama' is not supported; supported: qwen3_5, qwen3_5_moe, glm5_next"
    ):
        ModelConfig.from_hf_config(SimpleNamespace(model_type='llama'))


def test_heads_that_do_not_divide_by_the_ranks_are_refused() -> None:
    replayssm.cpu.enable()
    patch.enable(ReplayConfig())
    with pytest.raises(ValueError, match=r'tp: expected a divisor of linear_num_key_heads=2, got 4'):
        ModelConfig.from_pretrained(
            str(demo.ensure('odd')), device_type='cpu', dtype='float32', dist_config=DistConfig(tp=4)
        )


@pytest.mark.parametrize(
    ('model', 'method', 'message'),
    [
        ('tiny', 'deepseek_mtp', "speculative method: qwen3_5 needs 'qwen3_5_mtp', got 'deepseek_mtp'"),
        ('glm', 'qwen3_5_mtp', "speculative method: glm5_next needs 'deepseek_mtp', got 'qwen3_5_mtp'"),
    ],
)
def test_another_model_s_way_of_drafting_is_refused(model: str, method: str, message: str) -> None:
    replayssm.cpu.enable()
    patch.enable(ReplayConfig())
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_pretrained(
            str(demo.ensure(model)), device_type='cpu', dtype='float32', spec_method=method, num_spec_tokens=3
        )


def test_a_window_longer_than_the_buffer_is_refused() -> None:
    replayssm.cpu.enable()
    patch.enable(ReplayConfig(buffer_len=3))
    with pytest.raises(ValueError, match=r'buffer_len: expected at least 4 .*got 3'):
        ModelConfig.from_pretrained(
            str(demo.ensure('tiny')), device_type='cpu', dtype='float32', spec_method='qwen3_5_mtp', num_spec_tokens=3
        )


class Owner:
    value = 1

    @classmethod
    def make(cls, x: int) -> tuple[str, int]:
        return cls.__name__, x


class Heir(Owner):
    pass


def test_patches_keep_classmethods_and_inherited_attributes() -> None:
    patches = Patches()

    @patches.wrap(Owner, 'make')
    def make(original: Any, x: int) -> Any:
        return original(x + 1)

    patches.set(Heir, 'value', 5)
    patches.add(Heir, 'extra', 7)
    assert Owner.make(1) == ('Owner', 2)
    assert (Heir.value, Owner.value) == (5, 1)
    patches.undo()
    assert Owner.make(1) == ('Owner', 1)
    assert 'value' not in vars(Heir)
    assert not hasattr(Heir, 'extra')


def test_a_vanished_name_and_a_taken_name_do_not_pass() -> None:
    patches = Patches()
    with pytest.raises(AttributeError):
        patches.set(Owner, 'gone', 1)
    with pytest.raises(AttributeError, match="already has an attribute 'value'"):
        patches.add(Owner, 'value', 1)
    assert not patches
