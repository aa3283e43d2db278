"""The trained demo model in the real engine: the same tokens whatever is switched on, drafts that help, and English."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from replayssm import demo, patch
from replayssm.config import ReplayConfig
from replayssm.demo.training import card
from replayssm.patch import Settings
from replayssm.stats import counters_of
from tests.conftest import TokenEngine
from tests.demo.prompts import NUM_TEXTS, PROMPTS, question
from tests.patch.engine import EngineOptions, generate, running
from tests.patch.logits import recorded_logits

FOLDER = demo.ensure('small')
STOCK, REPLAY = Settings(replay=None), Settings(replay=ReplayConfig(buffer_len=16))
TOKENS = 256
COMMON_WORDS = frozenset(
    {'a', 'and', 'as', 'be', 'by', 'for', 'he', 'in', 'is', 'it', 'not', 'of', 'that', 'the', 'to', 'was'}
)


@dataclass(frozen=True, slots=True)
class Answers:
    """Greedy answers of one engine to all prompts, and the windows that it verified by the drafts accepted."""

    tokens: list[list[int]]
    texts: list[str]
    windows: list[int]


def answers(settings: Settings, num_drafts: int, prompts: Sequence[str] = PROMPTS, num_tokens: int = TOKENS) -> Answers:
    """Answer all prompts in one batch, in float32, in which sums of another order have not changed a token."""
    patch.enable(settings)
    batch = len(prompts)
    engine = TokenEngine(FOLDER, num_drafts, dtype='float32', max_batch_size=batch, num_gpu_blocks=8 * batch)
    try:
        responses = engine.responses(prompts, num_tokens)
        counts = counters_of(engine.engine.scheduler).accepted_drafts
        tokens = [list(response.token_ids) for response in responses]
        return Answers(tokens, [response.text for response in responses], [counts[n] for n in range(num_drafts + 1)])
    finally:
        engine.close()
        patch.disable()


@pytest.fixture(scope='module')
def stock(cpu_device: None) -> Answers:
    """Without drafts, with whole states."""
    return answers(STOCK, 0)


@pytest.fixture(scope='module')
def drafted(cpu_device: None) -> Answers:
    """With three drafts and ReplaySSM."""
    return answers(REPLAY, 3)


@pytest.fixture
def unpatched(cpu_device: None) -> Iterator[None]:
    yield
    patch.disable()


def test_drafts_and_replay_change_no_token(stock: Answers, drafted: Answers) -> None:
    assert len(PROMPTS) == 50
    assert [len(tokens) for tokens in stock.tokens] == [TOKENS] * len(PROMPTS)
    assert drafted.tokens == stock.tokens


def test_replay_without_drafts_changes_no_token(stock: Answers, cpu_device: None) -> None:
    few = answers(REPLAY, 0, PROMPTS[::4], 128)
    assert few.tokens == [tokens[:128] for tokens in stock.tokens[::4]]


def test_drafts_are_accepted(drafted: Answers) -> None:
    windows = drafted.windows
    assert sum(accepted * count for accepted, count in enumerate(windows)) > 1.2 * sum(windows)
    assert sum(windows[1:]) > 0.6 * sum(windows)


async def test_logits_stay_near_stock_for_a_thousand_tokens(unpatched: None) -> None:
    prompt = AutoTokenizer.from_pretrained(FOLDER).encode(PROMPTS[0])
    runs = []
    for settings in (STOCK, REPLAY):
        patch.enable(settings)
        async with running(EngineOptions(folder=FOLDER)) as engine:
            with recorded_logits() as records:
                (tokens,) = await generate(engine, [prompt], 1024)
        runs.append((tokens, torch.cat([record[0] for record in records])))
    (stock_tokens, stock_logits), (replay_tokens, replay_logits) = runs
    assert replay_tokens == stock_tokens
    assert len(stock_tokens) == 1024
    scale = stock_logits.abs().amax()
    length = min(len(stock_logits), len(replay_logits))
    drift = (stock_logits[:length] - replay_logits[:length]).abs().amax(dim=-1) / scale
    assert drift.max() < 1e-5
    # It does not grow with the text.
    assert drift[-256:].mean() < 4 * drift[:256].mean() + 1e-6


def test_it_speaks(stock: Answers) -> None:
    hello = stock.texts[PROMPTS.index(question('Hello'))]
    assert hello.startswith('Hello!')
    text = ''.join(stock.texts)
    assert sum(character in string.printable for character in text) > 0.99 * len(text)
    words = re.findall(r'[a-z]+', ' '.join(stock.texts[:NUM_TEXTS]).lower())
    assert len(words) > 10 * NUM_TEXTS
    assert sum(word in COMMON_WORDS for word in words) > 0.25 * len(words)


def test_every_demo_model_has_one_name() -> None:
    assert len(set(demo.names())) == len(demo.names()) == len(demo.TRAINED) + len(demo.SPECS)
    with pytest.raises(ValueError, match=', '.join(demo.names())):
        demo.ensure('large')


def test_it_is_used_where_it_lies_unless_another_type_is_asked_for(tmp_path: Path) -> None:
    assert demo.ensure('small', cache_dir=tmp_path) == demo.ensure('small', 'bfloat16', tmp_path) == FOLDER
    assert list(tmp_path.iterdir()) == []
    exact = demo.ensure('small', 'float32', tmp_path)
    assert exact.parent == tmp_path
    assert '"bfloat16"' not in (exact / 'config.json').read_text()
    shipped, converted = (load_file(folder / 'model.safetensors') for folder in (FOLDER, exact))
    assert {weight.dtype for weight in shipped.values()} == {torch.bfloat16}
    assert all(torch.equal(shipped[name].float(), weight) for name, weight in converted.items())
    assert shipped.keys() == converted.keys()


def test_what_is_shipped_is_small_and_readable_by_all() -> None:
    files = [path.stat() for path in FOLDER.iterdir()]
    assert sum(file.st_size for file in files) <= 16e6
    assert all(file.st_mode & 0o444 == 0o444 for file in files)


def test_the_card_is_that_of_the_results() -> None:
    results = json.loads((FOLDER / card.RESULTS).read_text())
    assert (FOLDER / card.CARD).read_text() == card.render(results)
