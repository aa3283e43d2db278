"""Demo checkpoints: written once, whole, and with the names and shapes that the engine loads."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from replayssm import demo
from replayssm.demo.checkpoint import default_cache_dir
from tests.conftest import CheckpointFactory


@pytest.fixture(scope='module')
def tokenizer(checkpoint: CheckpointFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint('tiny'))


def _ensure_tiny(cache_dir: Path) -> Path:
    return demo.ensure('tiny', cache_dir=cache_dir)


@pytest.mark.parametrize('name', [name for name, spec in demo.SPECS.items() if isinstance(spec, demo.DemoSpec)])
def test_shapes_follow_the_spec(checkpoint: CheckpointFactory, name: str) -> None:
    spec, folder = demo.SPECS[name], checkpoint(name)
    assert isinstance(spec, demo.DemoSpec)
    config = json.loads((folder / 'config.json').read_text())['text_config']
    weights = load_file(folder / 'model.safetensors')
    prefix = 'model.language_model.layers.'
    assert {int(key.removeprefix(prefix).split('.')[0]) for key in weights if key.startswith(prefix)} == set(
        range(spec.num_layers)
    )
    channels = 2 * spec.key_heads * spec.key_head_dim + spec.value_heads * spec.value_head_dim
    assert weights[f'{prefix}0.linear_attn.conv1d.weight'].shape == (channels, 1, 4)
    assert weights[f'{prefix}0.linear_attn.A_log'].shape == (spec.value_heads,)
    assert weights['mtp.fc.weight'].shape == (spec.hidden_size, 2 * spec.hidden_size)
    target = {key.removeprefix(f'{prefix}3.') for key in weights if key.startswith(f'{prefix}3.')}
    draft = {key.removeprefix('mtp.layers.0.') for key in weights if key.startswith('mtp.layers.0.')}
    assert draft == target
    assert sum(config['rope_parameters']['mrope_section']) == spec.attention_head_dim // 8
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.parametrize('name', ['glm', 'glm_odd'])
def test_no_weight_of_glm_is_at_its_default(checkpoint: CheckpointFactory, name: str) -> None:
    """Zeros and ones hide mistakes; the draft layer that follows the target has a few on purpose."""
    weights = load_file(checkpoint(name) / 'model.safetensors')
    deliberate = ('eh_proj.weight', 'enorm.weight')
    for key, weight in weights.items():
        assert weight.isfinite().all()
        assert key.endswith(deliberate) or not ((weight == 0) | (weight == 1)).any(), key


def test_same_weights_every_time(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    first = load_file(checkpoint('tiny') / 'model.safetensors')
    second = load_file(demo.ensure('tiny', cache_dir=tmp_path) / 'model.safetensors')
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bfloat16_rounds_the_same_weights(checkpoint: CheckpointFactory) -> None:
    exact = load_file(checkpoint('odd') / 'model.safetensors')
    rounded = load_file(checkpoint('odd', 'bfloat16') / 'model.safetensors')
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)


def test_written_once(tmp_path: Path) -> None:
    folder = _ensure_tiny(tmp_path)
    written = (folder / 'model.safetensors').stat().st_mtime_ns
    assert _ensure_tiny(tmp_path) == folder
    assert (folder / 'model.safetensors').stat().st_mtime_ns == written


def test_processes_agree_on_one_folder(tmp_path: Path) -> None:
    with multiprocessing.get_context('spawn').Pool(2) as pool:
        folders = pool.map(_ensure_tiny, [tmp_path] * 2)
    assert len(set(folders)) == 1
    assert list(tmp_path.iterdir()) == [folders[0]]


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError('disk full')

    monkeypatch.setattr('safetensors.torch.save_file', fail)
    with pytest.raises(OSError, match='disk full'):
        _ensure_tiny(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(('name', 'dtype'), [('huge', 'float32'), ('tiny', 'float16')])
def test_unknown_models_raise(tmp_path: Path, name: str, dtype: str) -> None:
    with pytest.raises(ValueError, match='expected one of'):
        demo.ensure(name, dtype, cache_dir=tmp_path)


def test_cache_folder() -> None:
    assert default_cache_dir({'XDG_CACHE_HOME': '/var/cache'}) == Path('/var/cache/replayssm')
    assert default_cache_dir({}) == Path.home() / '.cache' / 'replayssm'
    with pytest.raises(ValueError, match='absolute'):
        default_cache_dir({'XDG_CACHE_HOME': 'cache'})


@pytest.mark.parametrize('text', ['', 'plain', 'Ä日本\n\t€', '<|im_end|> in text', '\x00\x7f'], ids=ascii)
def test_any_text_survives(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_one_token_a_byte(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer.encode('Ä日本')) == len('Ä日本'.encode())


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
    messages = [
        {'role': 'system', 'content': 'Be brief.'},
        {'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]},
        {'role': 'assistant', 'content': None, 'tool_calls': [call]},
        {'role': 'tool', 'content': '2'},
    ]
    plain = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, tokenize=False)
    assert plain == ('<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n')
    tools = [{'type': 'function', 'function': {'name': 'add'}}]
    with_tools = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert with_tools.startswith('<|im_start|>system\nBe brief.\n\n# Tools')
    assert with_tools.count('<|im_start|>system') == 1
    assert '{"type": "function", "function": {"name": "add"}}' in with_tools
    assert with_tools.endswith(
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        '<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n'
    )
