"""The demo model's training: its text, its tokenizer, its drafts, and a short run that the engine loads."""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from replayssm import demo
from replayssm.demo.training import card, dialogues, documents, export, vocabulary
from replayssm.demo.training import corpus as corpora
from replayssm.demo.training.acceptance import Acceptance
from replayssm.demo.training.corpus import Corpus, Document, Provenance
from replayssm.demo.training.loop import scale_at
from replayssm.demo.training.sizes import SIZES
from replayssm.demo.training.trainee import NUM_DRAFTS, DraftLayer, Trainee
from tests.conftest import CheckpointFactory, TokenEngine
from tests.models.transformers_logits import reference_logits
from tests.patch.engine import EngineOptions, generate, running
from tests.patch.logits import recorded_logits
from tests.patience import LIVENESS_S

MODULES = tuple(documents.python_modules(Path(email.__file__).parent))


@pytest.fixture(scope='module')
def corpus() -> Corpus:
    raw = [Document('Python', name, 'code', text) for name, text in MODULES for name in (name, f'copy/{name}')]
    kept = tuple(corpora.without_repetition(raw))
    return Corpus((Provenance('Python', '3', 'modules', 'PSF-2.0', 'code', len(kept), 1, 1),), kept)


@pytest.fixture(scope='module')
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a checkpoint after 20 steps, made by the command in a process where transformers has no fla."""
    folder = tmp_path_factory.mktemp('training')
    corpora.write(corpus, folder / 'corpus.jsonl.xz')
    options = '--device cpu --size mini --rows 4 --length 64 --max-steps 20 --no-measure'
    command = [sys.executable, '-m', 'replayssm.demo.training', '--corpus', folder / 'corpus.jsonl.xz']
    subprocess.run([*command, '--out', folder / 'model', *options.split()], check=True, timeout=LIVENESS_S)
    return folder / 'model'


@pytest.mark.parametrize(
    'text', ['', 'def f(x):\n    return x', 'Ä日本\n\t€', '12345', '<|im_end|> \x00\x7f'], ids=ascii
)
def test_any_text_survives_the_learnt_tokenizer(text: str) -> None:
    tokenizer = vocabulary.learn((text for _, text in MODULES[:3]), 400)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    sizes = vocabulary.bytes_per_token(tokenizer)
    special = sum(map(len, re.findall(r'<\|im_end\|>', text)))
    assert sum(sizes[i] for i in ids) == len(text.encode()) - special
    assert len(tokenizer) == 400


def test_a_vocabulary_without_room_for_bytes_raises() -> None:
    with pytest.raises(ValueError, match='at least 263, got 256'):
        vocabulary.learn(['text'], 256)


def test_nothing_held_out_is_trained_on(corpus: Corpus) -> None:
    def blocks(held_out: bool) -> set[str]:
        text = '\n\n'.join(document.text for document in corpus.part(held_out))
        return {' '.join(block.split()) for block in text.split('\n\n') if len(' '.join(block.split())) >= 80}

    assert corpus.part(held_out=True)
    assert len(blocks(held_out=False)) > 100
    assert blocks(held_out=False).isdisjoint(blocks(held_out=True))
    assert len({document.name for document in corpus.documents}) == len(corpus.documents)


def test_a_corpus_is_read_as_it_was_written(corpus: Corpus, tmp_path: Path) -> None:
    corpora.write(corpus, tmp_path / 'corpus.jsonl.xz')
    assert corpora.read(tmp_path / 'corpus.jsonl.xz') == corpus
    with pytest.raises(FileNotFoundError, match='no corpus there'):
        corpora.read(tmp_path / 'none')


def test_dialogues_answer_what_they_are_asked(corpus: Corpus) -> None:
    made = dialogues.derive(corpus.documents)
    assert made == dialogues.derive(corpus.documents)
    functions = [talk for talk in made if talk.user.startswith('Write a Python function')]
    assert functions
    assert all(talk.assistant.startswith('```python\ndef ') for talk in functions)
    sums = [re.findall(r'\d+', talk.assistant) for talk in made if re.match(r'What is \d+ \+', talk.user)]
    assert sums
    assert all(int(a) + int(b) == int(total) for a, b, total in sums)


def test_the_learning_rate_ends_near_zero() -> None:
    scales = [scale_at(progress / 100) for progress in range(101)]
    assert max(scales) == 1.0
    assert scales[0] < 0.05
    assert scales[-1] < 0.05


@pytest.fixture
def meta_trainee(tmp_path: Path) -> Iterator[Trainee]:
    """The model that is shipped, without memory."""
    tokenizer = vocabulary.learn((text for _, text in MODULES[:3]), 400)
    export.prepare(tmp_path, SIZES['small'], tokenizer)
    with torch.device('meta'):
        yield Trainee(tmp_path)


def test_the_shipped_model_fits_its_limit(meta_trainee: Trainee) -> None:
    weights = meta_trainee.published_weights().values()
    # The rest of 16 MB is for the tokenizer.
    assert 2 * sum(weight.numel() for weight in weights) < 15.5e6


def test_drafts_in_training_are_those_of_decoding(run: Path) -> None:
    """All positions at once give what a KV cache gives that was filled up to one position and went on from there."""
    config = AutoConfig.from_pretrained(run).text_config
    torch.manual_seed(0)
    layer, rotary = DraftLayer(config).eval(), Qwen3_5TextRotaryEmbedding(config)
    length, origin = 12, 5
    hidden, embeddings = torch.randn(2, 1, length, config.hidden_size)
    with torch.inference_mode():
        states = layer(hidden, embeddings, rotary)
        assert [state.size(1) for state in states] == [length - step for step in range(1, NUM_DRAFTS + 1)]
        # What a decoder has of the same text: states up to the origin, and the tokens that its drafts added.
        known = hidden[:, : origin + 1]
        for step, state in enumerate(states, 1):
            tokens = embeddings[:, 1 : known.size(1) + 1]
            inputs = torch.cat((layer.pre_fc_norm_embedding(tokens), layer.pre_fc_norm_hidden(known)), dim=-1)
            positions = torch.arange(known.size(1)).expand(3, 1, -1)
            output = layer.layers[0](layer.fc(inputs), position_embeddings=rotary(embeddings, positions))
            draft = layer.norm(output)[:, -1:]
            torch.testing.assert_close(
                state[:, origin : origin + 1], draft, msg=lambda text, step=step: f'{step} {text}'
            )
            known = torch.cat((known, draft), dim=1)


def test_a_short_run_lowers_the_loss(run: Path) -> None:
    curve = json.loads((run / 'results.json').read_text())['curve']
    assert curve[-1]['step'] == 20
    assert curve[-1]['loss'] < curve[0]['loss'] - 0.5
    assert curve[-1]['draft_losses'][0] < curve[0]['draft_losses'][0]


def test_weights_have_the_published_names(run: Path, checkpoint: CheckpointFactory) -> None:
    weights = load_file(run / 'model.safetensors')
    assert weights.keys() == load_file(checkpoint('tiny') / 'model.safetensors').keys()
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(weight.isfinite().all() for weight in weights.values())


async def test_the_engine_computes_what_transformers_does(run: Path, cpu_device: None) -> None:
    prompt = list(range(40, 80))
    async with running(EngineOptions(folder=run)) as engine:
        with recorded_logits() as records:
            (answer,) = await generate(engine, [prompt], 20)
    logits = torch.cat([record[0] for record in records])
    (wanted,) = reference_logits({str(run): [[*prompt, *answer[:-1]]]})[str(run)]
    wanted = wanted[len(prompt) - 1 :]
    torch.testing.assert_close(logits[: len(wanted)], wanted, rtol=1e-4, atol=1e-4)


def test_loaders_that_add_the_one_in_bfloat16_round_nothing(run: Path) -> None:
    norm = load_file(run / 'model.safetensors')['model.language_model.norm.weight']
    assert norm.any()
    assert torch.equal((norm + 1).float(), norm.float() + 1)


def test_drafts_leave_the_answers_as_they_are(run: Path, cpu_device: None) -> None:
    prompts, answers = ['import email', 'def get_payload(self', 'Return the'], []
    for num_drafts in (0, 3):
        engine = TokenEngine(run, num_drafts=num_drafts, dtype='float32')
        answers.append(engine.tokens(prompts, 48))
        engine.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ('unmeasured', 'reason'),
    [({'cuda': 'no time was left'}, 'no time was left'), ({}, 'it was not tried')],
    ids=['failed', 'missing'],
)
def test_the_card_says_what_was_measured_and_what_was_not(unmeasured: dict[str, str], reason: str) -> None:
    results = json.loads((demo.TRAINED['small'] / card.RESULTS).read_text())
    row = Acceptance('cpu', 'float32', 0.0, 4, 16, (1, 0, 1, 2), 4)
    results |= {
        'sources': [asdict(Provenance('Python', '3', 'modules', 'PSF-2.0', 'code', 1, 1, 1))],
        'agreement': [0.7, 0.6, 0.5],
        'bits_per_byte': {'prose': 1.5, 'all': 1.25},
        'samples': [{'prompt': 'def f():\n', 'text': '    return\n```', 'ended': True}],
        'acceptance': {'cpu': [asdict(row)]} | unmeasured,
    }
    text = card.render(results)
    assert '| cpu, float32 | 0 | 2.00 | 75.0% | 75.0% | 50.0% | 4 of 4 |' in text
    assert f'| cuda | not measured: {reason}' in text
    assert '| Python | 3 | modules | PSF-2.0 |' in text
    assert '- Python, PSF-2.0: Copyright' in text
    assert '\n    >>>     return\n    ```\n' in text
