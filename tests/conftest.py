"""Fixtures shared by all tests: demo checkpoints and engines on CPU tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

import replayssm.cpu
from replayssm import demo, patch
from replayssm.config import ReplayConfig
from replayssm.cpu import CpuSettings
from replayssm.patching import Patches

CheckpointFactory = Callable[..., Path]

# On a busy machine an example takes as long as it takes.
settings.register_profile('no deadline', deadline=None)
settings.load_profile('no deadline')


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        '--device',
        choices=('cpu', 'cuda'),
        default='cpu',
        help='where operators run; cuda selects the tests that take a device and those marked cuda',
    )
    parser.addoption('--soak', action='store_true', help='select the tests marked soak, and no others')


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption('--soak'):
        return 'device: cpu (only tests marked soak)'
    on_gpu = config.getoption('--device') == 'cuda'
    return (
        'device: cuda (only tests of operators and of the GPU)' if on_gpu else 'device: cpu (none marked cuda or soak)'
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = config.getoption('--device') == 'cuda'

    def is_selected(item: pytest.Item) -> bool:
        needs_gpu = item.get_closest_marker('cuda') is not None
        if (item.get_closest_marker('soak') is not None) != config.getoption('--soak'):
            return False
        return needs_gpu or 'device' in getattr(item, 'fixturenames', ()) if on_gpu else not needs_gpu

    config.hook.pytest_deselected(items=[item for item in items if not is_selected(item)])
    items[:] = [item for item in items if is_selected(item)]


@pytest.fixture(scope='session', autouse=True)
def single_thread() -> None:
    """Operators this small only wait for their threads, above all on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope='session')
def device(pytestconfig: pytest.Config) -> str:
    """Device type on which operators are tested."""
    return str(pytestconfig.getoption('--device'))


class TokenEngine:
    """LMDeploy's pipeline on the cpu device type, as a function from prompts to greedy token ids."""

    def __init__(self, checkpoint: Path, num_drafts: int = 0, **options: Any) -> None:
        from lmdeploy import PytorchEngineConfig, pipeline
        from lmdeploy.messages import SpeculativeConfig

        defaults = {'session_len': 1024, 'max_batch_size': 8, 'num_gpu_blocks': 64}
        drafts = SpeculativeConfig('qwen3_5_mtp', num_speculative_tokens=num_drafts) if num_drafts else None
        self.pipeline = pipeline(
            str(checkpoint),
            backend_config=PytorchEngineConfig(device_type='cpu', language_model_only=True, **(defaults | options)),
            log_level='ERROR',
            speculative_config=drafts,
        )

    @property
    def engine(self) -> Any:
        """The `lmdeploy.pytorch.engine.Engine` behind the pipeline."""
        return self.pipeline.async_engine.engine

    def responses(self, prompts: Sequence[str], max_new_tokens: int, **options: Any) -> list[Any]:
        """Greedy responses to raw `prompts`, decoded in one batch, never stopped by the end token."""
        from lmdeploy import GenerationConfig

        config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, ignore_eos=True, **options)
        return list(self.pipeline(list(prompts), gen_config=config, do_preprocess=False))

    def tokens(self, prompts: Sequence[str], max_new_tokens: int) -> list[list[int]]:
        return [list(response.token_ids) for response in self.responses(prompts, max_new_tokens)]

    def close(self) -> None:
        self.pipeline.close()


@pytest.fixture(scope='session')
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """Folder of a demo checkpoint by name and dtype, written once a session."""
    cache_dir = tmp_path_factory.mktemp('checkpoints')

    def ensure(name: str, dtype: Any = 'float32') -> Path:
        return demo.ensure(name, dtype, cache_dir=cache_dir)

    return ensure


@pytest.fixture(scope='module')
def cpu_device() -> Iterator[None]:
    """The cpu device type, enabled for one module."""
    # More threads only wait for each other in models of this size.
    replayssm.cpu.enable(CpuSettings(threads_per_rank=1))
    yield
    replayssm.cpu.disable()


@pytest.fixture
def cpu_engine() -> Iterator[None]:
    """The cpu device type for one test, which leaves no patch and no Ray behind."""
    replayssm.cpu.enable(CpuSettings(threads_per_rank=1))
    yield
    patch.disable()
    replayssm.cpu.disable()
    if 'ray' in sys.modules:
        sys.modules['ray'].shutdown()


@pytest.fixture
def replaying_engine(cpu_engine: None) -> None:
    """The same with ReplaySSM."""
    patch.enable(ReplayConfig(16))


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    """An engine on a GPU whose weights are random and whose tokens are given, see `forced_tokens`."""
    from tests.patch.cuda_engine import forced_tokens

    with forced_tokens(monkeypatch) as patches:
        yield patches


@pytest.fixture
def build_engine(cpu_device: None, checkpoint: CheckpointFactory) -> Iterator[Callable[..., TokenEngine]]:
    """`build_engine(name, dtype='float32', num_drafts=0, **PytorchEngineConfig options)`, closed after the test."""
    with ExitStack() as stack:

        def build(name: str, dtype: str = 'float32', **options: Any) -> TokenEngine:
            engine = TokenEngine(checkpoint(name), dtype=dtype, **options)
            stack.callback(engine.close)
            return engine

        yield build
