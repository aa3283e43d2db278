"""One training run from the corpus to its results, within a time budget."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from replayssm.demo.training import card, dialogues, export, measure, vocabulary
from replayssm.demo.training import corpus as corpora
from replayssm.demo.training.batches import Sampler, dialogue_texts, document_texts, encode
from replayssm.demo.training.loop import Plan, Point, train
from replayssm.demo.training.sizes import SIZES
from replayssm.demo.training.trainee import Trainee

_MEASURING_SHARE = 0.2
_VOCABULARY_STRIDE = 4


@dataclass(frozen=True, slots=True)
class Options:
    """What one run is asked for; the command line's help describes them.

    Raises:
        ValueError: a size that there is not.
    """

    out: Path
    corpus: Path
    device: str
    minutes: float
    size: str
    rows: int
    length: int
    learning_rate: float
    seed: int
    max_steps: int | None
    measure: bool
    delta_rule: str

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f'size: expected one of {", ".join(SIZES)}, got {self.size!r}')


def run(options: Options) -> None:
    """Train, export and measure into `options.out`, where results.json says what came out.

    The weights are there before anything is measured. A measurement by the engine that fails or runs out of time is
    written down as the reason why it is missing.
    """
    start = time.monotonic()
    deadline = start + 60 * options.minutes
    corpus = corpora.read(options.corpus)
    trainee, sampler = _prepare(options, corpus)
    text, chats = (stream.tokens.numel() / 1e6 for stream in (sampler.documents, sampler.dialogues))
    _say(start, f'{text:.1f} M tokens of text, {chats:.1f} M of dialogues')
    train_s = deadline - time.monotonic() - _MEASURING_SHARE * 60 * options.minutes
    plan = Plan(max(1.0, train_s), options.learning_rate, options.max_steps)
    on_gpu = options.device == 'cuda'
    points = train(trainee, sampler, plan, options.out, lambda point: _say(start, _line(point)), autocast=on_gpu)
    results = {
        'options': {name: value for name, value in asdict(options).items() if not isinstance(value, Path)},
        'machine': torch.cuda.get_device_name() if on_gpu else 'a CPU',
        'parameters': sum(weight.numel() for weight in trainee.parameters()),
        'sources': [asdict(source) for source in corpus.sources],
        'curve': [asdict(point) for point in points],
    }
    measure.update(options.out, results)
    _say(start, 'trained')
    if options.measure:
        measure.add_text_figures(options.out, corpus, options.device)
        for device in dict.fromkeys((options.device, 'cpu')):
            measure.add_acceptance(options.out, options.corpus, device, deadline - time.monotonic())
        card.write(options.out)
        _say(start, 'measured')


def _prepare(options: Options, corpus: corpora.Corpus) -> tuple[Trainee, Sampler]:
    """Return the untrained model and its batches, with everything but the weights written to `options.out`."""
    torch.manual_seed(options.seed)
    spec = SIZES[options.size]
    documents = corpus.part(held_out=False)
    chats = dialogues.derive(documents)
    # A quarter of the text has the same frequent words as all of it.
    sample = [document.text for document in documents[::_VOCABULARY_STRIDE]]
    sample += [chat.assistant for chat in chats[::_VOCABULARY_STRIDE]]
    tokenizer = vocabulary.learn(sample, spec.vocab_size)
    export.prepare(options.out, spec, tokenizer)
    trainee = Trainee(options.out).to(options.device)
    return trainee, Sampler(
        encode(tokenizer, document_texts(documents), options.device),
        encode(tokenizer, dialogue_texts(tokenizer, chats), options.device),
        options.rows,
        options.length,
        torch.Generator(options.device).manual_seed(options.seed),
    )


def _line(point: Point) -> str:
    drafts = ' '.join(f'{share:.0%}' for share in point.agreement)
    return f'step {point.step}, {point.tokens / 1e6:.2f} M tokens: loss {point.loss:.3f}, drafts right {drafts}'


def _say(start: float, text: str) -> None:
    print(f'{time.monotonic() - start:7.1f} s  {text}', flush=True)
