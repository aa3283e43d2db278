"""Figures of a trained checkpoint, added to its results.json and its card; training does it, and so does

python -m replayssm.demo.training.measure DIR CORPUS --device cpu
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from replayssm.demo.training import card, delta_rule
from replayssm.demo.training import corpus as corpora
from replayssm.demo.training.acceptance import measure_apart

_HELD_OUT_TOKENS = {'cpu': 16_384, 'cuda': 400_000}


def add_text_figures(folder: Path, corpus: corpora.Corpus, device: str) -> None:
    """Measure bits per byte, drafts on held-out text and samples with transformers."""
    # Importing these binds transformers to one delta rule, which `main` chooses first.
    from replayssm.demo.training.evaluate import Evaluation

    length = int(read(folder)['options']['length'])
    held_out, max_tokens = corpus.part(held_out=True), _HELD_OUT_TOKENS[device]
    evaluation = Evaluation(folder, device)
    figures = {
        'agreement': evaluation.draft_agreement(held_out, length, max_tokens),
        'bits_per_byte': evaluation.bits_per_byte(held_out, length, max_tokens),
        'samples': [asdict(sample) for sample in evaluation.samples()],
    }
    update(folder, figures)


def add_acceptance(folder: Path, corpus: Path, device: str, timeout_s: float) -> None:
    """Measure accepted drafts with the engine on `device`, or write down why that was not possible."""
    found = measure_apart(folder, corpus, device, timeout_s)
    rows = found if isinstance(found, str) else [asdict(row) for row in found]
    update(folder, {'acceptance': read(folder).get('acceptance', {}) | {device: rows}})


def read(folder: Path) -> dict[str, Any]:
    """Return the results in `folder`.

    Raises:
        FileNotFoundError: there are none.
    """
    results: dict[str, Any] = json.loads((folder / card.RESULTS).read_text())
    return results


def update(folder: Path, figures: Mapping[str, Any]) -> None:
    """Put `figures` in place of the results of the same names."""
    path = folder / card.RESULTS
    results = read(folder) if path.is_file() else {}
    path.write_text(json.dumps({**results, **figures}, indent=1) + '\n')


def main(
    folder: Annotated[Path, typer.Argument(help='Folder of a training run.')],
    corpus: Annotated[Path, typer.Argument(help='What it was trained on.')],
    device: Annotated[str, typer.Option(help='cuda or cpu.')] = 'cpu',
    engine_only: Annotated[bool, typer.Option(help="Leave all but the engine's figures as they are.")] = False,
    minutes: Annotated[float, typer.Option(help='For the engine.')] = 10,
) -> None:
    """Measure a trained checkpoint again, on this machine, and write its card again."""
    if not engine_only:
        delta_rule.choose(device)
        add_text_figures(folder, corpora.read(corpus), device)
    add_acceptance(folder, corpus, device, 60 * minutes)
    card.write(folder)


if __name__ == '__main__':
    typer.run(main)
