"""Weights drawn at random: a whole checkpoint, the same one whatever the number of ranks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from replayssm import demo, patch
from replayssm.config import ReplayConfig
from replayssm.patch import Settings
from replayssm.random_weights import Weight, draw, weights_of
from tests.bench.shapes import write_config
from tests.patch.engine import EngineOptions, generate, random_prompt, running

SETTINGS = Settings(ReplayConfig(16), random_weights=True)


pytestmark = pytest.mark.usefixtures('cpu_engine')


def without_weights(model: str, folder: Path) -> Path:
    """A copy of a demo model that has no weights."""
    return Path(shutil.copytree(demo.ensure(model), folder / model, ignore=shutil.ignore_patterns('*.safetensors')))


@pytest.mark.parametrize('model', ['glm', 'tiny', 'moe'])
def test_a_checkpoint_has_these_names_and_shapes(model: str) -> None:
    folder = demo.ensure(model)
    with safe_open(folder / 'model.safetensors', framework='pt') as file:
        expected = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    weights = list(weights_of(AutoConfig.from_pretrained(folder)))
    assert {weight.name: tuple(weight.shape) for weight in weights} == expected
    assert 0 < sum(weight.is_draft for weight in weights) < len(weights)


@pytest.mark.parametrize(('model', 'tp'), [('glm', 2), pytest.param('moe', 2, marks=pytest.mark.soak)])
async def test_ranks_cut_the_same_model(model: str, tp: int, tmp_path: Path) -> None:
    folder = without_weights(model, tmp_path)
    prompts = [random_prompt(n) for n in (5, 40)]
    patch.enable(SETTINGS)
    answers = []
    for options in (EngineOptions(model, 3, folder=folder), EngineOptions(model, 3, folder=folder, tp=tp)):
        async with running(options) as engine:
            answers.append(await generate(engine, prompts, 20))
    assert answers[0] == answers[1]
    assert len(set(answers[0][0])) > 3


async def test_drafts_are_accepted_as_told(tmp_path: Path) -> None:
    patch.enable(replace(SETTINGS, accepted_drafts=(0.0, 0.0, 1.0, 0.0)))
    async with running(EngineOptions('glm', 3, folder=without_weights('glm', tmp_path))) as engine:
        await generate(engine, [random_prompt(9)], 60)
        accepted = (await patch.collect(engine)).accepted_drafts
    assert accepted[2] > 10
    assert sum(accepted) - accepted[2] <= 1, 'the end of the answer may cut a window short'


def test_fp8_comes_with_scales(tmp_path: Path) -> None:
    write_config(tmp_path, 'glm-5.3-flash', layers=4, fp8=True)
    weights = {weight.name: weight for weight in weights_of(AutoConfig.from_pretrained(tmp_path))}
    layer = 'model.language_model.layers.'
    formats = {
        f'{layer}0.self_attn.q_proj.weight': True,
        f'{layer}0.self_attn.b_proj.weight': False,
        f'{layer}3.self_attn.kv_b_proj.weight': True,
        f'{layer}3.self_attn.kv_a_proj_with_mqa.weight': True,
        f'{layer}3.self_attn.indexer.wk.weight': True,
        f'{layer}3.self_attn.indexer.weights_proj.weight': False,
        f'{layer}3.mlp.experts.287.down_proj.weight': True,
        f'{layer}3.mlp.gate.weight': False,
        f'{layer}4.eh_proj.weight': False,
        'lm_head.weight': False,
    }
    assert {name: weights[name].is_fp8 for name in formats} == formats
    drawn = dict(draw(Weight('x.weight', (300, 256), is_fp8=True), torch.bfloat16, torch.Generator()))
    weight, scales = drawn['x.weight'], drawn['x.weight_scale_inv']
    assert (weight.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (3, 2))
    spread = float((weight.float() * scales[0, 0]).std())
    assert spread == pytest.approx(1.25 / 256**0.5, rel=0.05)


def test_names_alone_decide() -> None:
    generator = torch.Generator()
    first, other = Weight('a.weight', (4, 8)), Weight('b.weight', (4, 8))
    (_, once), *_ = draw(first, torch.float32, generator)
    (_, between), *_ = draw(other, torch.float32, generator)
    (_, again), *_ = draw(first, torch.float32, generator)
    assert torch.equal(once, again) and not torch.equal(once, between)


def test_unknown_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a glm5_next, qwen3_5 or qwen3_5_moe, got 'llama'"):
        weights_of(SimpleNamespace(model_type='llama'))
    config = write_config(tmp_path, 'qwen3.5-35b-a3b', layers=4)
    (tmp_path / 'config.json').write_text(json.dumps(config | {'quantization_config': {'quant_method': 'fp8'}}))
    with pytest.raises(ValueError, match='expected qwen3_5_moe in BF16'):
        weights_of(AutoConfig.from_pretrained(tmp_path))
