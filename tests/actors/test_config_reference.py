"""The page of configuration keys: complete, described and up to date."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from actors.config import AppConfig, EngineConfig, ModelConfig, RouterConfig, WorkerConfig
from actors.config_reference import reference

ROOT = Path(__file__).parents[2]


def keys(config: BaseModel, path: str = '') -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key that holds a value, with its dotted path."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from keys(value, f'{path}{name}.')
        else:
            yield f'{path}{name}', field


def every_key() -> list[tuple[str, FieldInfo]]:
    engine = EngineConfig.model_validate({'speculative': {}})
    worker = WorkerConfig.model_validate({'autoscaling': {'max_replicas': 2}})
    return list(keys(AppConfig(model=ModelConfig(name='demo', demo='tiny'), engine=engine, worker=worker)))


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / 'docs/configuration.md').read_text() == reference(), 'run `make docs`'


def test_every_key_is_described() -> None:
    assert [key for key, field in every_key() if not field.description] == []


def test_every_key_has_a_row() -> None:
    rows = [line.split('`')[1] for line in reference().splitlines() if line.startswith('| `')]
    assert sorted({key for key, _ in every_key()} | {'engine.speculative', 'worker.autoscaling'}) == sorted(rows)


@pytest.mark.parametrize(
    'row',
    [
        pytest.param('| `model.name` | str | required | not empty |', id='required'),
        pytest.param('| `metrics.port` | int or `null` | `9401` | ≥ 1, ≤ 65535 |', id='optional'),
        pytest.param('| `api.allow_origins` | list of str | `[]` |  |', id='list'),
        pytest.param('| `engine.device` | `cpu` or `cuda` | `cuda` |  |', id='choice'),
        pytest.param('| `engine.speculative` | section or `null` | `null` |  |', id='optional section'),
        pytest.param('| `worker.report_period_s` | float | `1` | > 0 |', id='annotated'),
    ],
)
def test_a_row_says_what_the_model_says(row: str) -> None:
    assert f'\n{row}' in reference()


def test_defaults_are_those_of_an_empty_section() -> None:
    assert f'| `router.max_queued` | int | `{RouterConfig().max_queued}` |' in reference()
