"""LMDeploy's engine with and without ReplaySSM on one GPU, on random weights of a real model's shape.

    python -m tests.bench.bench_engine run --replay --drafts 3 --batch 64 --out arm.json     one arm, one JSON
    python -m tests.bench.bench_engine run --model glm-5.3-flash --shard 4 --fp8 --out arm.json
    python -m tests.bench.bench_engine table docs/data/engine_*.json                         the deltas

Arms run in processes of their own; alternate their order and compare only figures of one machine and one run.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from replayssm.gpu import GpuReader
from tests.bench.shapes import METHODS, MODELS, write_config

app = typer.Typer(help=__doc__, no_args_is_help=True)

ACCEPTANCE = {
    'none': (1.0,),
    'one': (0.0, 1.0),
    'two': (0.0, 0.0, 1.0),
    'three': (0.0, 0.0, 0.0, 1.0),
    'mix': (0.1, 0.1, 0.1, 0.7),
}
"""Shares of verify steps that accept 0, 1, 2, 3 drafts; the mix has a mean of 2.4."""
IN_LMDEPLOY = frozenset({'qwen3.5-35b-a3b'})
"""Models that LMDeploy runs without this package."""
_FIRST = {'model': 'qwen3.5-35b-a3b', 'shard': 1, 'fp8': False, 'eager': False, 'buffer_len': 16}
"""What files mean that were written when there was no choice."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One measured configuration."""

    model: str
    replay: bool
    drafts: int
    batch: int
    layers: int
    shard: int
    fp8: bool
    eager: bool
    tokens_in: int
    tokens_out: int
    kv_blocks: int
    acceptance: str
    record_dtype: str
    checkpoint_dtype: str
    buffer_len: int


class MemoryPeak(threading.Thread):
    """Polls the used memory of this process's GPU every 20 ms; NVML counts all GPUs of the host."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes: int | None = None

    def run(self) -> None:
        gpu = GpuReader(torch.device('cuda', 0))
        while True:
            self.peak_bytes = gpu.read().memory_peak_bytes
            time.sleep(0.02)


async def generate_all(engine: Any, arm: Arm, vocabulary: int, tokens_out: int, seed: int) -> dict[str, float]:
    """As many greedy requests as the batch holds; throughput, mean TTFT and mean TPOT."""
    from lmdeploy.messages import GenerationConfig

    generator = torch.Generator().manual_seed(seed)
    config = GenerationConfig(max_new_tokens=tokens_out, ignore_eos=True, top_k=1)
    first_s: list[float] = []
    per_token_s: list[float] = []
    counts: list[int] = []

    async def one(session_id: int, prompt: list[int]) -> None:
        begin, first, count = time.perf_counter(), 0.0, 0
        async for output in engine.create_instance().async_stream_infer(session_id, prompt, config):
            if output.token_ids is not None and len(output.token_ids):
                first = first or time.perf_counter()
                count += len(output.token_ids)
        first_s.append(first - begin)
        per_token_s.append((time.perf_counter() - first) / max(count - 1, 1))
        counts.append(count)

    size, top = (arm.tokens_in,), min(vocabulary, 200_000)
    prompts = [torch.randint(100, top, size, generator=generator).tolist() for _ in range(arm.batch)]
    begin = time.perf_counter()
    await asyncio.gather(*(one(seed * 10_000 + i, prompt) for i, prompt in enumerate(prompts, 1)))
    elapsed_s = time.perf_counter() - begin
    assert set(counts) == {tokens_out}, f'expected {tokens_out} tokens from every request, got {set(counts)}'
    return {
        'output_tokens_per_s': sum(counts) / elapsed_s,
        'ttft_s': sum(first_s) / len(first_s),
        'tpot_s': sum(per_token_s) / len(per_token_s),
    }


async def measure(arm: Arm, repeats: int) -> dict[str, Any]:
    """Build the engine of one arm and measure it."""
    from lmdeploy.messages import PytorchEngineConfig, SpeculativeConfig
    from lmdeploy.pytorch.engine.engine import Engine

    from replayssm import patch
    from replayssm.config import ReplayConfig
    from replayssm.demo.tokenizer import build_tokenizer
    from replayssm.patch import Settings, forced_acceptance, random_weights
    from replayssm.patching import Patches

    path = Path(tempfile.mkdtemp(prefix='bench-engine-'))
    text = write_config(path, arm.model, arm.layers, arm.shard, arm.fp8)['text_config']
    build_tokenizer().save_pretrained(path)
    patches = Patches()
    random_weights.install(patches)
    if arm.drafts:
        forced_acceptance.install(patches, ACCEPTANCE[arm.acceptance])
    if arm.replay:
        config = ReplayConfig(arm.buffer_len, arm.checkpoint_dtype, arm.record_dtype)  # type: ignore[arg-type]
        patch.enable(config)
    elif arm.model not in IN_LMDEPLOY:
        patch.enable(Settings(replay=None))
    drafts = SpeculativeConfig(METHODS[arm.model], num_speculative_tokens=arm.drafts) if arm.drafts else None
    begin = time.perf_counter()
    engine = Engine.from_pretrained(
        str(path),
        engine_config=PytorchEngineConfig(
            tp=1,
            dtype='bfloat16',
            max_batch_size=arm.batch,
            session_len=32768,
            cache_max_entry_count=0.8,
            max_prefill_token_num=8192,
            language_model_only=True,
            num_gpu_blocks=arm.kv_blocks,
            cudagraph_capture_batch_sizes=[arm.batch],
            eager_mode=arm.eager,
        ),
        speculative_config=drafts,
    )
    start_s = time.perf_counter() - begin
    # Loading needs more memory than serving, and would hide its peak.
    torch.cuda.empty_cache()
    memory = MemoryPeak()
    memory.start()
    engine.start_loop()
    vocabulary = text['vocab_size']
    await generate_all(engine, arm, vocabulary, 16, seed=1)
    runs = [await generate_all(engine, arm, vocabulary, arm.tokens_out, seed=2 + i) for i in range(repeats)]
    cache = engine.executor.cache_config
    state_bytes = engine.executor.model_agent.state_cache_engine.allocation.nbytes
    stats = asdict(await patch.collect(engine)) if arm.replay else None
    return {
        'arm': asdict(arm),
        'start_s': start_s,
        'runs': runs,
        'nvml_peak_bytes': memory.peak_bytes,
        'kv_blocks': cache.num_gpu_blocks,
        'state_slots': cache.num_state_caches,
        'state_bytes': state_bytes,
        'replay': stats,
        'card': torch.cuda.get_device_name(),
        'versions': versions(),
    }


def versions() -> dict[str, str]:
    """Versions that a figure depends on."""
    import lmdeploy
    import triton

    return {'lmdeploy': lmdeploy.__version__, 'torch': torch.__version__, 'triton': triton.__version__}


@app.command()
def run(
    out: Annotated[Path, typer.Option(help='JSON file to write.')],
    model: Annotated[str, typer.Option(help=', '.join(MODELS))] = 'qwen3.5-35b-a3b',
    replay: bool = False,
    drafts: int = 0,
    batch: int = 256,
    layers: Annotated[int, typer.Option(help='The first ones; 0 for all.')] = 0,
    shard: Annotated[int, typer.Option(help="Widths of one of so many ranks; 1 for the model's own.")] = 1,
    fp8: Annotated[bool, typer.Option('--fp8', help='Weights in FP8, in blocks of 128 x 128.')] = False,
    eager: Annotated[bool, typer.Option('--eager', help='No CUDA graphs.')] = False,
    tokens_in: int = 1024,
    tokens_out: int = 256,
    kv_blocks: Annotated[int, typer.Option(help='KV blocks of 64 tokens; 0 fills the memory.')] = 0,
    acceptance: Annotated[str, typer.Option(help=', '.join(ACCEPTANCE))] = 'mix',
    record_dtype: str = 'float32',
    checkpoint_dtype: str = 'float32',
    buffer_len: int = 16,
    repeats: int = 2,
) -> None:
    """Measure one arm."""
    os.environ['LMDEPLOY_FP32_MAMBA_SSM_DTYPE'] = str(int(checkpoint_dtype == 'float32'))
    os.environ.setdefault('LMDEPLOY_ENABLE_CHECK_ENV', '0')
    count = layers or MODELS[model](None, 1)['text_config']['num_hidden_layers']
    arm = Arm(model, replay, drafts, batch, count, shard, fp8, eager, tokens_in, tokens_out, kv_blocks, acceptance,
              record_dtype, checkpoint_dtype, buffer_len)  # fmt: skip
    result = asyncio.run(measure(arm, repeats))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1))
    print(json.dumps({key: result[key] for key in ('arm', 'runs', 'start_s')}), flush=True)
    # LMDeploy's engine threads outlive a closed engine; the figures are on disk.
    os._exit(0)


@app.command()
def table(files: list[Path]) -> None:
    """Print ON against OFF for every pair of arms that differ in nothing else."""
    results = [json.loads(file.read_text()) for file in files]
    differing = ('replay', 'record_dtype', 'buffer_len')
    for result in results:
        result['arm'] = _FIRST | result['arm']
    print('arm | tok/s | TPOT | TTFT | state GiB | NVML peak GiB | KV blocks')
    for off in (r for r in results if not r['arm']['replay']):
        for on in (r for r in results if r['arm']['replay']):
            if all(value == on['arm'][key] for key, value in off['arm'].items() if key not in differing):
                print(_row(off, on))


def _row(off: dict[str, Any], on: dict[str, Any]) -> str:
    def best(result: dict[str, Any], key: str, choose: Any) -> float:
        return float(choose(run[key] for run in result['runs']))

    def change(key: str, choose: Any) -> str:
        before, after = best(off, key, choose), best(on, key, choose)
        return f'{before:.4g} -> {after:.4g} ({after / before - 1:+.1%})'

    def gib(key: str) -> str:
        if off[key] is None or on[key] is None:
            return '-'
        before, after = off[key] / 2**30, on[key] / 2**30
        return f'{before:.2f} -> {after:.2f} ({after - before:+.2f})'

    arm = on['arm']
    shape = f'{arm["model"]}, {arm["layers"]} layers, 1/{arm["shard"]}{", fp8" * arm["fp8"]}{", eager" * arm["eager"]}'
    records = f'{arm["buffer_len"]} records of {arm["record_dtype"]}'
    name = f'{shape}, drafts {arm["drafts"]}, batch {arm["batch"]}, {arm["acceptance"]}, {records}'
    columns = [name, change('output_tokens_per_s', max), change('tpot_s', min), change('ttft_s', min)]
    columns += [gib('state_bytes'), gib('nvml_peak_bytes'), f'{off["kv_blocks"]} -> {on["kv_blocks"]}']
    return ' | '.join(columns)


if __name__ == '__main__':
    app()
