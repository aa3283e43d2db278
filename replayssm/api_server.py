"""LMDeploy's own API server with ReplaySSM: `python -m replayssm.api_server MODEL [options]`.

All options of `lmdeploy serve api_server` mean what they mean there. Added are `--enable-replayssm` with its settings
and `--device cpu`. Without `--enable-replayssm` the engine is LMDeploy's with the fixes of `replayssm.patch.Fixes`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from replayssm import environment
from replayssm.config import MAX_BUFFER_LEN, MIN_BUFFER_LEN, ReplayConfig, StateDtype
from replayssm.patching import Patches

_DEFAULT = ReplayConfig()
_REPLAY_SETTINGS = ('replayssm_buffer_len', 'replayssm_checkpoint_dtype', 'replayssm_record_dtype')
_CPU_MAX_BATCH_SIZE = 16


def main(argv: Sequence[str]) -> None:
    """Serve until interrupted."""
    environment.set_defaults(float32_states=False)
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        replay = replay_config(args)
    except ValueError as error:
        parser.error(str(error))
    environment.set_defaults(float32_states=replay is not None and replay.checkpoint_dtype == 'float32')
    _install(args, replay)
    _prepare(args)
    args.run(args)


def build_parser() -> argparse.ArgumentParser:
    """Return LMDeploy's parser of `serve api_server`, extended."""
    from lmdeploy.cli.serve import SubCliServe

    SubCliServe.add_parser_api_server()
    parser: argparse.ArgumentParser = SubCliServe.subparsers.choices['api_server']
    parser.prog = 'python -m replayssm.api_server'
    parser.set_defaults(backend='pytorch')
    device = next(action for action in parser._actions if action.dest == 'device')
    device.choices = [*(device.choices or ()), 'cpu']
    group = parser.add_argument_group('ReplaySSM arguments')
    group.add_argument('--enable-replayssm', action='store_true', help='Keep the states of GDN layers with ReplaySSM')
    group.add_argument(
        '--replayssm-buffer-len',
        type=int,
        metavar='L',
        help=f'Most records over a checkpoint, {MIN_BUFFER_LEN} to {MAX_BUFFER_LEN}. Default: {_DEFAULT.buffer_len}',
    )
    for name, default in (('checkpoint', _DEFAULT.checkpoint_dtype), ('record', _DEFAULT.record_dtype)):
        group.add_argument(
            f'--replayssm-{name}-dtype',
            choices=get_args(StateDtype),
            help=f'Data type of the {name}s. Default: {default}',
        )
    return parser


def replay_config(args: argparse.Namespace) -> ReplayConfig | None:
    """Return ReplaySSM's settings, None when it is off.

    Raises:
        ValueError: a setting is out of range, or given options cannot be combined.
    """
    given = {name: getattr(args, name) for name in _REPLAY_SETTINGS if getattr(args, name) is not None}
    if given and not args.enable_replayssm:
        options = ', '.join('--' + name.replace('_', '-') for name in given)
        raise ValueError(f'{options}: expected --enable-replayssm beside it')
    if args.backend != 'pytorch' and (args.enable_replayssm or args.device == 'cpu'):
        raise ValueError(f'--backend: expected pytorch with --enable-replayssm or --device cpu, got {args.backend}')
    if args.enable_replayssm and args.device not in ('cuda', 'cpu'):
        raise ValueError(f'--device: expected cuda or cpu with --enable-replayssm, got {args.device}')
    if args.dp > 1 and (args.enable_replayssm or args.device == 'cpu'):
        raise ValueError(f'--dp: expected 1 with --enable-replayssm or --device cpu, got {args.dp}')
    if not args.enable_replayssm:
        return None
    return ReplayConfig(**{name.removeprefix('replayssm_'): value for name, value in given.items()})


def _install(args: argparse.Namespace, replay: ReplayConfig | None) -> None:
    if args.device == 'cpu':
        from replayssm import cpu

        cpu.enable()
    if args.backend == 'pytorch':
        from replayssm import patch

        patch.enable(patch.Settings(replay))
    if args.device == 'cpu' or replay is not None:
        _run_engine_in_this_process()


def _run_engine_in_this_process() -> None:
    """Undo the server's choice of a process of its own for the engine, which ReplaySSM does not support."""
    from lmdeploy.pytorch.engine import Engine

    @Patches().wrap(Engine, 'from_pretrained')
    def from_pretrained(build: Any, path: str, engine_config: Any = None, **options: Any) -> Any:
        engine_config.enable_mp_engine = False
        return build(path, engine_config=engine_config, **options)


def _prepare(args: Any) -> None:
    """Do what LMDeploy's entry point does between parsing and serving."""
    from lmdeploy.utils import get_model

    args.model_name = args.model_name or args.model_path
    if not Path(args.model_path).exists():
        args.model_path = get_model(args.model_path, download_dir=args.download_dir, revision=args.revision)
    if args.device == 'cpu':
        args.max_batch_size = args.max_batch_size or _CPU_MAX_BATCH_SIZE
        args.eager_mode = True


if __name__ == '__main__':
    main(sys.argv[1:])
