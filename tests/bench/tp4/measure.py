"""One arm, in a process of its own: deploy, wait, ask, report."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from actors.config import AppConfig
from actors.local import Deployment
from actors.messages import RouterStats
from tests.bench.tp4.arms import Arm
from tests.bench.tp4.traffic import APPLICATION, Client, MemoryPeak, random_prompts
from tests.chaos.faults import kill_rank
from tests.ports import free_port

_begin = time.monotonic()
READY_S = 540.0
_SAY_EVERY_S = 5.0


def say(message: str) -> None:
    """Print a line with the seconds since the start of the process."""
    print(f'[{time.monotonic() - _begin:6.1f} s] {message}', flush=True)


def measure(arm: Arm, out: Path) -> None:
    """Run one arm; `out` is written after every phase, so that a later one takes nothing away.

    Raises:
        RuntimeError: the model did not load, or did not come back.
    """
    config = AppConfig.model_validate(arm.args)
    result: dict[str, Any] = {'arm': asdict(arm), 'versions': _versions()}
    memory = MemoryPeak()
    memory.start()
    say(f'{arm.name}: starting Ray and Serve')
    with Deployment(config, APPLICATION, {'host': '127.0.0.1', 'port': free_port()}):
        asyncio.run(_measure(arm, config, result, memory, out))
        say(f'{arm.name}: done, stopping')


async def _measure(arm: Arm, config: AppConfig, result: dict[str, Any], memory: MemoryPeak, out: Path) -> None:
    client = Client(config)

    def save() -> None:
        gpus = memory.peak_bytes[: config.engine.tp]
        result['nvml_peak_bytes'] = memory.peak_bytes
        result['nvml_peak_mean_bytes'] = sum(gpus) / len(gpus) if gpus else None
        out.write_text(json.dumps(result, indent=1))

    begin = time.monotonic()
    stats = await _until_ready(client)
    result['ready_s'] = time.monotonic() - begin
    say(f'{arm.name}: ready after {result["ready_s"]:.1f} s')
    result |= _of_ranks(await _with_engine(client), config)
    save()
    if arm.kind == 'greedy':
        result['answers'] = await _greedy(client, arm)
    else:
        await _load(client, arm, result, save)
    result |= _of_ranks(await _with_engine(client), config)
    save()
    if arm.recovery:
        result['recovery'] = await _recover(client, arm, stats.workers[0].worker_id, result['answers'][0]['tokens'])
        save()


async def _until_ready(client: Client, other_than: str = '', timeout_s: float = READY_S) -> RouterStats:
    """Wait for a ready worker.

    Raises:
        RuntimeError: its model did not load in time, or not at all.
    """
    begin = said = time.monotonic()
    state = ''
    while time.monotonic() - begin < timeout_s:
        try:
            stats = await client.stats()
            workers = [worker for worker in stats.workers if worker.worker_id != other_than]
            state = ', '.join(f'{worker.state} {worker.message}'.strip() for worker in workers) or 'no worker'
            if any(worker.state == 'ready' for worker in workers):
                return stats
            if not other_than and any(worker.state == 'failed' for worker in workers):
                raise RuntimeError(f'the model did not load: {state}')
        except (OSError, ConnectionError) as error:
            state = repr(error)
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            say(f'  waiting: {state}')
        await asyncio.sleep(0.2)
    raise RuntimeError(f'not ready after {timeout_s:g} s: {state}')


async def _with_engine(client: Client) -> RouterStats:
    """Return numbers in which the engine's are."""
    for _ in range(100):
        stats = await client.stats()
        if any(worker.state == 'ready' and worker.engine is not None for worker in stats.workers):
            return stats
        await asyncio.sleep(0.2)
    raise RuntimeError('no statistics from the engine for 20 s')


def _of_ranks(stats: RouterStats, config: AppConfig) -> dict[str, Any]:
    """What every rank has and where it is."""
    (engine,) = (w.engine for w in stats.workers if w.state == 'ready' and w.engine is not None)
    ranks = engine.replay.ranks
    gpus = [rank.gpu.index if rank.gpu is not None else None for rank in ranks]
    in_place = config.engine.device == 'cpu' or gpus == list(range(config.engine.tp))
    if not in_place:
        say(f'  WARNING: expected rank i on GPU i, got {gpus}')
    return {
        'ranks': len(ranks),
        'gpus': gpus,
        'ranks_in_place': in_place and len(ranks) == config.engine.tp,
        'state_bytes': [sum(rank.state_bytes.values()) for rank in ranks],
        'stock_bytes': [rank.stock_bytes for rank in ranks],
        'kv_blocks': engine.replay.kv_blocks,
        'accepted_drafts': list(engine.replay.accepted_drafts),
    }


async def _greedy(client: Client, arm: Arm) -> list[dict[str, Any]]:
    answers = []
    lengths = (5, arm.tokens_in // 2, arm.tokens_in)
    for seed, length in enumerate(lengths, 1):
        (prompt,) = random_prompts(1, length, arm.vocabulary, seed)
        answer = await client.ask(prompt, arm.tokens_out, logprobs=5)
        answers.append({'prompt': prompt, 'tokens': answer.tokens, 'logprobs': answer.logprobs})
        say(f'  {length} tokens in, {len(answer.tokens)} out: {answer.last_s:.2f} s')
    return answers


async def _load(client: Client, arm: Arm, result: dict[str, Any], save: Any) -> None:
    warm_up = await client.ask_all(random_prompts(arm.batch, arm.tokens_in, arm.vocabulary, 1), 16)
    say(f'  warm-up {warm_up["elapsed_s"]:.1f} s')
    result['runs'] = []
    for seed in range(2, 2 + arm.repeats):
        prompts = random_prompts(arm.batch, arm.tokens_in, arm.vocabulary, seed)
        run = await client.ask_all(prompts, arm.tokens_out)
        result['runs'].append(run)
        save()
        say('  ' + ', '.join(f'{key} {value:.4g}' for key, value in run.items()))


async def _recover(client: Client, arm: Arm, worker: str, expected: list[int]) -> dict[str, Any]:
    """Kill a rank while a request runs; when the worker is back, what it answers, and what became of the request."""
    prompt = random_prompts(1, 5, arm.vocabulary, 1)[0]
    running = asyncio.create_task(client.ask(prompt, arm.tokens_out))
    await asyncio.sleep(0.3)
    begin = time.monotonic()
    if not await asyncio.to_thread(kill_rank, random.Random(0)):
        raise RuntimeError('recovery: there is no rank to kill')
    say('  killed a rank')
    await _until_ready(client, other_than=worker)
    ready_s = time.monotonic() - begin
    say(f'  ready again after {ready_s:.1f} s')
    after = await client.ask(prompt, arm.tokens_out)
    answer_s = time.monotonic() - begin
    interrupted = await asyncio.wait_for(running, 120)
    say(f'  answers again after {answer_s:.1f} s')
    return {
        'ready_s': ready_s,
        'answer_s': answer_s,
        'same_answer': after.tokens == expected,
        'interrupted_answer_complete': len(interrupted.tokens) == arm.tokens_out,
        'interrupted_same_answer': interrupted.tokens == expected,
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ('lmdeploy', 'torch', 'triton', 'transformers', 'ray'):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = 'unknown'
    return found
