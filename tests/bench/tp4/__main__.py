"""A deployment on several tensor-parallel ranks, measured as a whole; README.md beside this says how.

python -m tests.bench.tp4 run --config deploy/glm_tp4.yaml --tp 2 --layers 8 --out DIR
python -m tests.bench.tp4 table DIR
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer

from tests.bench.tp4.arms import Arm, Options, plan
from tests.bench.tp4.report import compare, lines

app = typer.Typer(help=__doc__, no_args_is_help=True)

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    'NCCL_NVLS_ENABLE': '0',
    'TORCH_SYMM_MEM_DISABLE_MULTICAST': '1',
    'NVSHMEM_DISABLE_NVLS': '1',
    'RAY_USAGE_STATS_ENABLED': '0',
    'HF_HUB_OFFLINE': '1',
    'LMDEPLOY_ENABLE_CHECK_ENV': '0',
}
"""Of all processes: multicast over NVLink is not there on every machine."""
RAY = Path('/tmp/ray')
ARMS = ('greedy', 'recovery', 'target', 'mtp3')


@app.command()
def run(
    config: Annotated[Path, typer.Option(help='Serve config file to start from.')],
    out: Annotated[Path, typer.Option(help='Folder for one JSON per arm.')],
    tp: Annotated[int, typer.Option(help='Ranks.')] = 4,
    layers: Annotated[int, typer.Option(help='The first ones; 0 for all. The draft layer comes on top.')] = 0,
    model: Annotated[Literal['glm', 'qwen'], typer.Option()] = 'glm',
    device: Annotated[Literal['cuda', 'cpu'], typer.Option(help='cpu is a dry run with a tiny model.')] = 'cuda',
    arms: Annotated[str, typer.Option(help='Some of ' + ', '.join(ARMS))] = ','.join(ARMS),
    rounds: Annotated[int, typer.Option(help='Pairs of ON and OFF per kind.')] = 1,
    repeats: Annotated[int, typer.Option(help='Measured runs per arm.')] = 1,
    batch_target: int = 256,
    batch_mtp: int = 64,
    tokens_in: int = 1024,
    tokens_out: int = 256,
    kv_blocks: Annotated[int, typer.Option(help='0: as many as the requests need.')] = 0,
    fp8: Annotated[bool, typer.Option(help='GLM in FP8, as released.')] = True,
    experts: Annotated[int, typer.Option(help='Only so many, all chosen: no near ties of routers; 0: as real.')] = 0,
    eager: Annotated[bool | None, typer.Option(help='None: as the file says.')] = None,
    arm_timeout_s: Annotated[float, typer.Option(help='Each arm may take so long, start and stop included.')] = 600.0,
    strict: Annotated[bool | None, typer.Option(help='Fail when greedy answers differ; None: on the CPU.')] = None,
) -> None:
    """Run arms one after the other, each in a process of its own; exit 1 if one failed."""
    chosen = {name.strip() for name in arms.split(',') if name.strip()}
    if not chosen or not chosen <= set(ARMS):
        raise typer.BadParameter(f'arms: expected some of {", ".join(ARMS)}, got {arms!r}')
    out.mkdir(parents=True, exist_ok=True)
    options = Options(config, tp, layers, model, device, out, batch_target, batch_mtp, tokens_in, tokens_out, kv_blocks,
                      fp8, experts, eager, repeats)  # fmt: skip
    failed = [arm.name for arm in plan(options, chosen, rounds) if not _run_arm(arm, out, arm_timeout_s)]
    results = _results(out)
    print(*lines(results), sep='\n', flush=True)
    if strict if strict is not None else device == 'cpu':
        failed += _differing(results)
    if failed:
        print('FAILED: ' + ', '.join(failed), flush=True)
        raise typer.Exit(1)


@app.command()
def arm(spec: Path, out: Path) -> None:
    """Run one arm in this process; `run` calls this."""
    from tests.bench.tp4.measure import measure

    measure(Arm.read(spec), out)
    sys.stdout.flush()
    # Threads of libraries must not hold up the next arm.
    os._exit(0)


@app.command()
def table(folder: Path) -> None:
    """Print what the arms in a folder have measured."""
    print(*lines(_results(folder)), sep='\n')


def _run_arm(arm: Arm, out: Path, timeout_s: float) -> bool:
    spec, result = out / f'{arm.name}.spec', out / f'{arm.name}.json'
    spec.write_text(arm.dump())
    result.unlink(missing_ok=True)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get('PYTHONPATH'))))
    env = ENVIRONMENT | os.environ | {'PYTHONPATH': paths, 'PYTHONUNBUFFERED': '1'}
    print(f'=== {arm.name}, at most {timeout_s:g} s', flush=True)
    begin = time.monotonic()
    process = subprocess.Popen([sys.executable, '-m', 'tests.bench.tp4', 'arm', spec, result], env=env)
    try:
        code: int | None = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
        print(f'{arm.name}: TIMEOUT after {timeout_s:g} s', flush=True)
    finally:
        _kill_tree(process.pid)
        process.wait()
    elapsed_s = time.monotonic() - begin
    if code == 0:
        print(f'=== {arm.name}: {elapsed_s:.1f} s', flush=True)
        return True
    print(f'=== {arm.name}: FAILED after {elapsed_s:.1f} s, exit status {code}', flush=True)
    _print_logs(process.pid)
    return False


def _kill_tree(pid: int) -> None:
    """End a process and all that it has started, such as a Ray whose driver was killed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for child in (*parent.children(recursive=True), parent):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _print_logs(driver: int, count: int = 6, tail: int = 25) -> None:
    """Print the ends of the logs that were written last by workers and ranks of a driver's Ray, which is named so."""
    logs = [path for session in RAY.glob(f'session_*_{driver}') for path in (session / 'logs').rglob('*')]
    files = [path for path in logs if path.is_file() and ('Worker' in path.name or path.name.startswith('worker-'))]
    files = sorted((file for file in files if file.stat().st_size), key=lambda file: file.stat().st_mtime)
    for file in files[-count:]:
        print(f'--- {file}')
        print(*file.read_text(errors='replace').splitlines()[-tail:], sep='\n', flush=True)


def _results(folder: Path) -> list[dict[str, object]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob('*.json'))]


def _differing(results: list[dict[str, object]]) -> list[str]:
    answers = {r['arm']['name']: r['answers'] for r in results if 'answers' in r}  # type: ignore[index]
    single = answers.pop('greedy-tp1', None)
    if single is None:
        return []
    rows = {name: compare(ours, single) for name, ours in answers.items()}  # type: ignore[arg-type]
    return [f'{name} differs' for name, found in rows.items() if any(row['equal_share'] < 1 for row in found)]


if __name__ == '__main__':
    app()
