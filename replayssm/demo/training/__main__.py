"""Train the demo model: `python -m replayssm.demo.training --out DIR --device cuda --minutes 15`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replayssm.demo.training import delta_rule


def main(
    out: Annotated[Path, typer.Option(help='Folder for the checkpoint, results.json and the card.')],
    corpus: Annotated[Path, typer.Option(help='What python -m replayssm.demo.training.corpus wrote.')] = Path(
        'build/demo-corpus.jsonl.xz'
    ),
    device: Annotated[str, typer.Option(help='cuda or cpu.')] = 'cuda',
    minutes: Annotated[float, typer.Option(help='For everything; a fifth is kept for measurements.')] = 15,
    size: Annotated[str, typer.Option(help='small or mini.')] = 'small',
    rows: Annotated[int, typer.Option(help='Windows in a batch.')] = 64,
    length: Annotated[int, typer.Option(help='Tokens of a window.')] = 512,
    learning_rate: Annotated[float, typer.Option(help='Of the plateau.')] = 4e-3,
    seed: Annotated[int, typer.Option(help='Of weights and batches.')] = 0,
    max_steps: Annotated[int | None, typer.Option(help='Stop after so many steps, time left or not.')] = None,
    measure: Annotated[bool, typer.Option(help='Measure the result and write its card.')] = True,
) -> None:
    """Train the demo model and leave a checkpoint within the given time, whatever it has reached."""
    if device not in ('cuda', 'cpu'):
        raise typer.BadParameter(f'expected cuda or cpu, got {device!r}', param_hint='--device')
    implementation = delta_rule.choose(device)
    typer.echo(f'gated delta rule: {implementation}')
    from replayssm.demo.training.run import Options, run

    run(
        Options(
            out=out,
            corpus=corpus,
            device=device,
            minutes=minutes,
            size=size,
            rows=rows,
            length=length,
            learning_rate=learning_rate,
            seed=seed,
            max_steps=max_steps,
            measure=measure,
            delta_rule=implementation,
        )
    )


if __name__ == '__main__':
    typer.run(main)
