"""The model card and the plot of the losses, from results.json: `python -m replayssm.demo.training.card DIR`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from replayssm.demo.training.acceptance import from_json
from replayssm.demo.training.sizes import SIZES

RESULTS = 'results.json'
CARD = 'README.md'
PLOT = 'loss.png'

_TEMPLATE = """\
# Demo model

A language model of {parameters:.1f} M parameters in the dense architecture of Qwen3.5, with its draft layer. It has
{layers} layers, every fourth of them full attention and the others Gated DeltaNet. It exists so that a server can
be tried on something that behaves like a model. It knows little, and what it says is often wrong.

| | |
|---|---|
| gated-delta layers | {spec.key_heads} query and {spec.value_heads} value heads, {spec.key_head_dim} wide |
| attention layers | {spec.attention_heads} query and {spec.kv_heads} key heads, {spec.attention_head_dim} wide |
| hidden size, feed-forward | {spec.hidden_size}, {spec.intermediate_size} |
| vocabulary | {spec.vocab_size}, byte-level BPE learnt from the same text |
| weights | bfloat16 |

## Quality

| held-out text | bits per byte |
|---|---|
{bits}

Drafts accepted by LMDeploy's engine with ReplaySSM, three at a time, on beginnings of held-out documents and questions
made of them. A draft counts when all before it were accepted too. Greedy answers of a model this small repeat
themselves, which is easily drafted; sampled ones show what drafts are worth on other text.

| | temperature | accepted of 3 | first | second | third | answers as without drafts |
|---|---|---|---|---|---|---|
{acceptance}

On held-out text itself, token by token: {agreement} of the first, second and third drafts are the target's first
choice.

## Samples

Greedy.

{samples}

## Training

{tokens:.1f} M tokens in {minutes:.1f} minutes on {machine}: windows of {options[length]} tokens, {options[rows]} in a
batch; Muon for matrices, AdamW for the rest, learning rate {options[learning_rate]}. The draft layer learns the
target's distribution for three drafts in a row, each from the state that the one before left.

![Losses of the target and of the drafts over the tokens trained on](loss.png)

## Text

Free to use, from packages of Debian and PyPI. One document in fifty is held out, and no long block of text is in both
parts. Dialogues are made of the same documents, beside greetings, counting and sums.

| package | version | what | licence | MB | held out |
|---|---|---|---|---|---|
{sources}
"""


def write(folder: Path) -> None:
    """Write the card, and the plot where matplotlib is installed, beside the results in `folder`.

    Raises:
        FileNotFoundError: `folder` has no results.json.
    """
    results = json.loads((folder / RESULTS).read_text())
    (folder / CARD).write_text(render(results))
    if importlib.util.find_spec('matplotlib') is not None:
        plot(results['curve'], folder / PLOT)


def render(results: Mapping[str, Any]) -> str:
    """Return the card of one run's results."""
    spec = SIZES[results['options']['size']]
    last = results['curve'][-1]
    return _TEMPLATE.format(
        spec=spec,
        layers=spec.num_layers,
        parameters=results['parameters'] / 1e6,
        options=results['options'],
        machine=results['machine'],
        tokens=last['tokens'] / 1e6,
        minutes=last['elapsed_s'] / 60,
        bits='\n'.join(f'| {kind} | {rate:.2f} |' for kind, rate in results['bits_per_byte'].items()),
        acceptance='\n'.join(_acceptance_rows(results['acceptance'])),
        agreement=', '.join(f'{share:.0%}' for share in results['agreement']),
        samples='\n\n'.join(_quote(sample) for sample in results['samples']),
        sources='\n'.join(_source_row(source) for source in results['sources']),
    )


def _acceptance_rows(measured: Mapping[str, Any]) -> Iterable[str]:
    for device, rows in measured.items():
        if isinstance(rows, str):
            yield f'| {device} | not measured: {rows} | | | | | |'
            continue
        for row in map(from_json, rows):
            cells = [f'{device}, {row.dtype}', f'{row.temperature:g}', f'{row.mean_accepted:.2f}']
            same = '' if row.same_answers is None else f'{row.same_answers} of {row.prompts}'
            yield f'| {" | ".join([*cells, *(f"{rate:.0%}" for rate in row.rates), same])} |'


def _quote(sample: Mapping[str, Any]) -> str:
    """Return a sample as an indented block, which no text in it can end."""
    text = f'{sample["prompt"]}\n>>> {sample["text"]}{"" if sample["ended"] else " ..."}'
    return '\n'.join(f'    {line}' for line in text.splitlines())


def _source_row(source: Mapping[str, Any]) -> str:
    sizes = (f'{source[part] / 1e6:.2f}' for part in ('train_bytes', 'held_out_bytes'))
    return f'| {" | ".join([source["package"], source["version"], source["content"], source["licence"], *sizes])} |'


def plot(curve: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw the loss curves into `path`."""
    from matplotlib.figure import Figure

    points = list(curve)
    tokens = [point['tokens'] / 1e6 for point in points]
    figure = Figure(figsize=(7, 4), layout='constrained')
    axes = figure.add_subplot(xlabel='tokens trained on, millions', ylabel='cross-entropy, nats a token')
    axes.plot(tokens, [point['loss'] for point in points], label='target')
    for step in range(len(points[0]['draft_losses'])):
        axes.plot(tokens, [point['draft_losses'][step] for point in points], label=f'draft {step + 1} against target')
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(folder: Annotated[Path, typer.Argument(help='Folder of a training run.')]) -> None:
    """Write the card of a training run again."""
    write(folder)


if __name__ == '__main__':
    typer.run(main)
