"""What is measured: arms, each a deployment of its own, and the configuration of every one."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from replayssm import demo
from tests.bench.shapes import METHODS, write_config

Model = Literal['glm', 'qwen']
NAMES = {'glm': 'glm-5.3-flash', 'qwen': 'qwen3.5-35b-a3b'}
DEMOS = {'glm': 'glm', 'qwen': 'tp4'}
"""What a dry run on the CPU has in their place."""
ACCEPTED = (0.1, 0.1, 0.1, 0.7)
_RECOVERY_S = 400.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; see `__main__.run`."""

    config: Path
    tp: int
    layers: int
    model: Model
    device: Literal['cpu', 'cuda']
    out: Path
    batch_target: int = 256
    batch_mtp: int = 64
    tokens_in: int = 1024
    tokens_out: int = 256
    kv_blocks: int = 0
    fp8: bool = True
    experts: int = 0
    eager: bool | None = None
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Arm:
    """One deployment and what is asked of it.

    Attributes:
        kind: 'greedy' compares answers, 'load' measures them.
        recovery: kill a rank at the end.
        args: of the application.
        vocabulary: token ids of prompts are below.
    """

    name: str
    kind: Literal['greedy', 'load']
    args: dict[str, Any]
    batch: int
    tokens_in: int
    tokens_out: int
    vocabulary: int
    repeats: int = 1
    recovery: bool = False

    def dump(self) -> str:
        """Return this arm as JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, path: Path) -> Arm:
        """Read what `dump` has written."""
        return cls(**json.loads(path.read_text()))


def make_folder(options: Options) -> Path:
    """Write config.json and tokenizer, and no weights; return the folder."""
    folder = options.out.resolve() / 'model'
    shutil.rmtree(folder, ignore_errors=True)
    source = demo.ensure(DEMOS[options.model])
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns('*.safetensors'))
    if options.device == 'cuda':
        fp8 = options.fp8 and options.model == 'glm'
        write_config(folder, NAMES[options.model], options.layers or None, fp8=fp8, experts=options.experts)
    return folder


def vocabulary_of(folder: Path) -> int:
    """Return how many token ids the model in `folder` has."""
    return int(json.loads((folder / 'config.json').read_text())['text_config']['vocab_size'])


def plan(options: Options, chosen: set[str], rounds: int) -> Iterator[Arm]:
    """Yield the arms in their order: every other pair of ON and OFF begins with ON."""
    folder = make_folder(options)
    if chosen & {'greedy', 'recovery'}:
        whole = _arm(options, folder, f'greedy-tp{options.tp}', 'greedy', 4, options.tp)
        if 'greedy' in chosen and options.tp > 1:
            yield _arm(options, folder, 'greedy-tp1', 'greedy', 4, 1)
        yield replace(whole, recovery='recovery' in chosen)
    pairs = 0
    for number in range(1, rounds + 1):
        for kind, batch in (('target', options.batch_target), ('mtp3', options.batch_mtp)):
            if kind not in chosen:
                continue
            order = (False, True) if pairs % 2 == 0 else (True, False)
            pairs += 1
            for replay in order:
                name = f'{kind}-{"on" if replay else "off"}-r{number}'
                yield _arm(options, folder, name, 'load', batch, options.tp, replay, drafts=3 * (kind == 'mtp3'))


def _arm(
    options: Options,
    folder: Path,
    name: str,
    kind: Literal['greedy', 'load'],
    batch: int,
    tp: int,
    replay: bool = True,
    drafts: int = 0,
) -> Arm:
    tokens_in, tokens_out = options.tokens_in, options.tokens_out
    if kind == 'greedy':
        tokens_in, tokens_out = min(tokens_in, 128), min(tokens_out, 64)
    args: dict[str, Any] = yaml.safe_load(options.config.read_text())['applications'][0]['args']
    engine = args['engine']
    block = 16 if options.device == 'cpu' else engine.get('block_size', 64)
    session = tokens_in + tokens_out + 64
    blocks = options.kv_blocks or batch * math.ceil((session + 16) / block) + 64
    args['model'] = {'name': NAMES[options.model], 'path': str(folder), 'random_weights': True}
    engine |= {
        'device': options.device,
        'tp': tp,
        'session_len': session,
        'max_batch_size': batch,
        'num_gpu_blocks': blocks,
        'block_size': block,
        'speculative': None,
        'replay': engine.get('replay', {}) | {'enabled': replay},
    }
    if options.eager is not None:
        engine['eager_mode'] = options.eager
    engine |= {'dtype': 'float32', 'max_prefill_token_num': 512} if options.device == 'cpu' else {}
    if drafts:
        method = METHODS[NAMES[options.model]]
        engine['speculative'] = {'method': method, 'num_tokens': drafts, 'accepted': list(ACCEPTED)}
    # Tokens of one request come together a few times a second: the reader must not be what is measured.
    args['worker'] = {'stream_period_s': 0.2, 'health_check_period_s': 1.0, 'stall_timeout_s': 240.0}
    args['router'] = {
        'max_queued': 4 * batch,
        'max_kv_share': None,
        'worker_timeout_s': 60.0,
        'lease_timeout_s': 60.0,
        'resume_wait_s': _RECOVERY_S,
        'max_resumes': 10,
        'request_timeout_s': 550.0,
    }
    args['metrics'] = {'port': None}
    return Arm(name, kind, args, batch, tokens_in, tokens_out, vocabulary_of(folder), options.repeats)
