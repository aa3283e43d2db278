"""The `replayssm` command."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help='ReplaySSM for LMDeploy.', no_args_is_help=True, add_completion=False)

_STATUS_STYLE = {'ok': 'green', 'note': 'yellow', 'missing': 'red'}
_MIB = 1 << 20

AsJson = Annotated[bool, typer.Option('--json', help='Print JSON instead of a table.')]


@app.command('demo-model')
def demo_model(
    name: Annotated[str, typer.Argument(help='Which one; an unknown name lists them.')] = 'small',
    dtype: Annotated[str | None, typer.Option(help='float32 or bfloat16; by default as the model comes.')] = None,
    cache_dir: Annotated[Path | None, typer.Option(help='Parent folder; by default in the user cache.')] = None,
) -> None:
    """Print the folder of a demo checkpoint, which is written first when it is not there yet."""
    from replayssm import demo

    try:
        typer.echo(demo.ensure(name, dtype, cache_dir))  # type: ignore[arg-type]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can run, and what is missing. Fails when nothing can run."""
    from replayssm.doctor import MODES, Report, examine

    report: Report = examine()
    if as_json:
        checks = [asdict(check) for check in report.checks]
        typer.echo(json.dumps({'modes': report.modes, 'checks': checks}, indent=2))
        raise typer.Exit(not report.can_run)
    console = Console()
    table = Table(box=None, pad_edge=False)
    for column in ('check', 'status', 'found', 'remedy'):
        table.add_column(column, overflow='fold')
    for check in report.checks:
        style = _STATUS_STYLE[check.status]
        table.add_row(check.name, f'[{style}]{check.status}[/]', check.detail, check.remedy)
    console.print(table)
    console.print()
    for mode, works in report.modes.items():
        console.print(f'[green]yes[/] {MODES[mode]}' if works else f'[red]no[/]  {MODES[mode]}', highlight=False)
    raise typer.Exit(not report.can_run)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help='A named shape or the folder of a checkpoint.')] = 'qwen3.5-35b-a3b',
    tp: Annotated[int, typer.Option(min=1, help='Tensor-parallel ranks.')] = 1,
    drafts: Annotated[int, typer.Option(min=0, help='Speculative tokens per step.')] = 3,
    max_batch_size: Annotated[int, typer.Option(min=1, help='Sequences that run at once.')] = 64,
    prefix_cache_state_budget: Annotated[int, typer.Option(min=0, help='State slots kept for prefix hits.')] = 0,
    block_size: Annotated[int, typer.Option(min=1, help='Tokens per KV-cache block.')] = 64,
    cache_max_entry_count: Annotated[float, typer.Option(min=0, max=1, help='Share of free memory for caches.')] = 0.8,
    buffer_len: Annotated[int, typer.Option(help='L, most records over a checkpoint.')] = 16,
    checkpoint_dtype: Annotated[str, typer.Option(help='float32 or bfloat16.')] = 'float32',
    record_dtype: Annotated[str, typer.Option(help='float32 or bfloat16.')] = 'float32',
    stock_dtype: Annotated[str | None, typer.Option(help="Of stock states; by default the checkpoint's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the state memory of one rank with and without ReplaySSM."""
    from replayssm.config import ReplayConfig
    from replayssm.plan import PlanOptions, load_shape, make_plan

    try:
        options = PlanOptions(
            tp,
            drafts,
            max_batch_size,
            prefix_cache_state_budget,
            block_size,
            cache_max_entry_count,
            stock_dtype,  # type: ignore[arg-type]
            ReplayConfig(buffer_len, checkpoint_dtype, record_dtype),  # type: ignore[arg-type]
        )
        result = make_plan(load_shape(model), options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        totals = {'stock_bytes': result.stock_bytes, 'replay_bytes': result.replay_bytes}
        typer.echo(json.dumps(asdict(result) | totals, indent=2))
        return
    Console().print(_plan_table(result))
    typer.echo(f'\n{result.kv_blocks_gained:+d} KV-cache blocks of {result.kv_block_bytes / _MIB:.2f} MiB per rank')


def _plan_table(result: Any) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column('MiB per rank')
    for column in ('stock', 'ReplaySSM', 'difference'):
        table.add_column(column, justify='right')
    for kind, size in result.replay_slot_bytes.items():
        _add_sizes(table, f'{kind}, per slot', result.stock_slot_bytes.get(kind, 0), size)
    _add_sizes(table, f'all, {result.slots} slots', result.stock_bytes, result.replay_bytes)
    return table


def _add_sizes(table: Table, name: str, stock_bytes: int, replay_bytes: int) -> None:
    sizes = (f'{stock_bytes / _MIB:.2f}', f'{replay_bytes / _MIB:.2f}', f'{(replay_bytes - stock_bytes) / _MIB:+.2f}')
    table.add_row(name, *sizes)


if __name__ == '__main__':
    app()
