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
from replayssm.demo.training.sources import SOURCES

RESULTS = 'results.json'
CARD = 'README.md'
PLOT = 'loss.png'

_DEVICES = ('cuda', 'cpu')
_TEMPLATE = """\
# Demo model: {parameters:.1f} M parameters

A small language model in the dense architecture of Qwen3.5, with a draft layer for speculative decoding. It exists so
that a server can be tried on something that behaves like a model. It knows little English and less Python, and what it
says is often wrong: use it for nothing else.

| | |
|---|---|
| layers | {layers}: three Gated DeltaNet, then one full attention, and so on |
| Gated DeltaNet | {spec.key_heads} query and {spec.value_heads} value heads of {spec.key_head_dim} channels |
| full attention | {spec.attention_heads} query and {spec.kv_heads} key heads of {spec.attention_head_dim} channels |
| hidden size, feed-forward size | {spec.hidden_size}, {spec.intermediate_size} |
| vocabulary | {spec.vocab_size} tokens, byte-level BPE learnt from the training text |
| weights | bfloat16; engines may compute in float32 |
| context | trained on {options[length]} tokens; it runs on longer ones, how well has not been measured |
| licence | Apache 2.0, as the project; notices of the training text are below |

## Quality

Bits that the model needs per byte of text it has not been trained on; fewer is better.

| text | bits per byte |
|---|---|
{bits}

Drafts accepted by LMDeploy's engine with ReplaySSM, three in a step, while it continued {prompts}
beginnings of held-out documents and questions made of them. The next columns are the shares of the steps in which the
first draft, the first two and all three were accepted. Greedy answers (temperature 0) of a model this small repeat
themselves, which is easily drafted; sampled answers (temperature 1) show what drafts are worth on other text.

| engine | temperature | accepted of 3 | first | two | three | same answers without drafts |
|---|---|---|---|---|---|---|
{acceptance}

When the held-out text itself is read token by token, {agreement} of the first, second and third drafts are what the
model itself would choose.

## Samples

Greedy. Behind `>>>` is what the model wrote; `...` means that it was cut off.

{samples}

## Training

{minutes:.1f} minutes on one {machine}, {tokens:.1f} M tokens: batches of {options[rows]} windows of {options[length]}
tokens, Muon for matrices and AdamW for the rest, learning rate {options[learning_rate]}. The loss ended at {loss:.2f}
nats a token. The draft layer learnt the model's own distribution for three drafts in a row, each from the state that
the one before left.

![Losses of the model and of its drafts over the tokens trained on](loss.png)

## Text

Free to use and to pass on, from packages of Debian and PyPI. About one document in fifty is held out, and no long block
of text is in both parts. Dialogues are made of the same documents, beside greetings, counting and sums. Sizes are in
MB.

| package | version | what | licence | trained on | held out |
|---|---|---|---|---|---|
{sources}

## Notices

The weights are no copy of this text, but may repeat passages of it. Its authors:

{notices}
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
        loss=last['loss'],
        minutes=last['elapsed_s'] / 60,
        bits='\n'.join(f'| {kind} | {rate:.2f} |' for kind, rate in results['bits_per_byte'].items()),
        prompts=_prompts(results['acceptance']),
        acceptance='\n'.join(_acceptance_rows(results['acceptance'])),
        agreement=', '.join(f'{share:.0%}' for share in results['agreement']),
        samples='\n\n'.join(_quote(sample) for sample in results['samples']),
        sources='\n'.join(_source_row(source) for source in results['sources']),
        notices='\n'.join(_notices(results['sources'])),
    )


def _prompts(measured: Mapping[str, Any]) -> str:
    """Return how many prompts the engines continued, and by how much."""
    asked = {(row['prompts'], row['tokens']) for rows in measured.values() if not isinstance(rows, str) for row in rows}
    return ' or '.join(f'by {tokens} tokens {prompts}' for prompts, tokens in sorted(asked))


def _acceptance_rows(measured: Mapping[str, Any]) -> Iterable[str]:
    for device in _DEVICES:
        rows = measured.get(device, 'it was not tried, or not finished in time')
        if isinstance(rows, str):
            yield f'| {device} | not measured: {rows} | | | | | |'
            continue
        for row in map(from_json, rows):
            cells = [f'{device}, {row.dtype}', f'{row.temperature:g}', f'{row.mean_accepted:.2f}']
            same = '' if row.same_answers is None else f'{row.same_answers} of {row.prompts}'
            yield f'| {" | ".join([*cells, *(f"{rate:.1%}" for rate in row.rates), same])} |'


def _notices(sources: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    known = {source.package: source.notice for source in SOURCES}
    for source in sources:
        if notice := known.get(source['package']):
            yield f'- {source["package"]}, {source["licence"]}: {notice}'


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
