"""Drafts accepted by this project's engine, and whether they change a token.

python -m replayssm.demo.training.acceptance FOLDER CORPUS --device cpu
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from replayssm import environment
from replayssm.demo.training import corpus as corpora
from replayssm.demo.training import dialogues

_PROMPT_CHARACTERS = 200
NUM_DRAFTS = 3


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the engine says of one checkpoint.

    Attributes:
        device, dtype: where and in what it ran.
        temperature: of sampling, 0 for greedy answers.
        prompts, tokens: prompts answered, and tokens generated for each.
        windows: verified windows by the number of drafts accepted, 0 to all.
        same_answers: prompts that get the same tokens without drafts; None when answers are sampled.
    """

    device: str
    dtype: str
    temperature: float
    prompts: int
    tokens: int
    windows: tuple[int, ...]
    same_answers: int | None

    @property
    def mean_accepted(self) -> float:
        """Drafts accepted per window."""
        return sum(accepted * count for accepted, count in enumerate(self.windows)) / max(1, sum(self.windows))

    @property
    def rates(self) -> list[float]:
        """Share of the windows in which each draft, all before it included, was accepted."""
        total = max(1, sum(self.windows))
        return [sum(self.windows[position:]) / total for position in range(1, len(self.windows))]


def held_out_prompts(tokenizer: Any, corpus: corpora.Corpus, count: int) -> list[str]:
    """Return beginnings of held-out documents, and every fourth time a question made of one."""
    documents = corpus.part(held_out=True)
    questions = [
        tokenizer.apply_chat_template(dialogue.messages[:1], add_generation_prompt=True, tokenize=False)
        for dialogue in dialogues.derive(documents)[: count // 4]
    ]
    # Evenly over the corpus, so that every source has its share.
    step = max(1, len(documents) // (count - len(questions)))
    beginnings = [document.text[:_PROMPT_CHARACTERS] for document in documents[::step]]
    return [*beginnings[: count - len(questions)], *questions]


def measure(folder: Path, prompts: Sequence[str], tokens: int, device: str) -> list[Acceptance]:
    """Generate with ReplaySSM in this process: greedily with and without drafts, and sampled with drafts."""
    environment.set_defaults(float32_states=True)
    if device == 'cpu':
        from replayssm import cpu

        cpu.enable(cpu.CpuSettings(threads_per_rank=1))
    from replayssm import patch
    from replayssm.config import ReplayConfig

    patch.enable(ReplayConfig(buffer_len=16))
    run = _Run(folder, prompts, tokens, device)
    (greedy, sampled), windows = run.answers(NUM_DRAFTS, (0.0, 1.0))
    (alone,), _ = run.answers(0, (0.0,))
    same = sum(a == b for a, b in zip(greedy, alone, strict=True))
    assert len(sampled) == len(greedy)
    return [
        Acceptance(device, run.dtype, temperature, len(prompts), tokens, counts, matches)
        for temperature, counts, matches in zip((0.0, 1.0), windows, (same, None), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Run:
    """What the engines of one measurement have in common."""

    folder: Path
    prompts: Sequence[str]
    tokens: int
    device: str

    @property
    def dtype(self) -> str:
        # In float32 two orders of the same sums hardly ever change a token.
        return 'float32' if self.device == 'cpu' else 'bfloat16'

    def answers(
        self, drafts: int, temperatures: Sequence[float]
    ) -> tuple[list[list[list[int]]], list[tuple[int, ...]]]:
        """Return, for each temperature, the tokens for every prompt and the windows by accepted drafts."""
        from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline
        from lmdeploy.messages import SpeculativeConfig

        from replayssm.stats import counters_of

        config = PytorchEngineConfig(
            device_type=self.device,
            dtype=self.dtype,
            language_model_only=True,
            session_len=2048,
            max_batch_size=8,
            num_gpu_blocks=512,
            eager_mode=self.device == 'cpu',
        )
        speculative = SpeculativeConfig('qwen3_5_mtp', num_speculative_tokens=drafts) if drafts else None
        answers, windows = [], []
        with pipeline(
            str(self.folder), backend_config=config, speculative_config=speculative, log_level='ERROR'
        ) as pipe:
            counts = counters_of(pipe.async_engine.engine.scheduler).accepted_drafts
            for temperature in temperatures:
                before = counts.copy()
                generation = GenerationConfig(
                    max_new_tokens=self.tokens,
                    do_sample=temperature > 0,
                    temperature=temperature or 1.0,
                    top_p=1.0,
                    top_k=0,
                    ignore_eos=True,
                )
                responses = pipe(list(self.prompts), gen_config=generation, do_preprocess=False)
                answers.append([list(response.token_ids) for response in responses])
                windows.append(tuple(counts[n] - before[n] for n in range(drafts + 1)))
        return answers, windows


def measure_apart(folder: Path, corpus: Path, device: str, timeout_s: float) -> list[Acceptance] | str:
    """Measure in a process of its own, since an engine changes the process that it runs in.

    Returns:
        The measurements, or why there are none: training must not fail for them.
    """
    if importlib.util.find_spec('lmdeploy') is None:
        return 'LMDeploy is not installed'
    if timeout_s <= 0:
        return 'no time was left'
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / 'acceptance.json'
        command = [sys.executable, '-m', 'replayssm.demo.training.acceptance', folder, corpus, '--device', device]
        try:
            subprocess.run([*map(str, command), '--out', str(result)], check=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f'not done within {timeout_s:.0f} s'
        except subprocess.CalledProcessError as error:
            return f'the engine ended with status {error.returncode}'
        return [from_json(row) for row in json.loads(result.read_text())]


def from_json(row: Mapping[str, Any]) -> Acceptance:
    """Return a measurement that was written as JSON."""
    return Acceptance(**{**row, 'windows': tuple(row['windows'])})


def main(
    folder: Annotated[Path, typer.Argument(help='Checkpoint.')],
    corpus: Annotated[Path, typer.Argument(help='What its held-out prompts are taken from.')],
    device: Annotated[str, typer.Option(help='cuda or cpu.')] = 'cpu',
    prompts: Annotated[int, typer.Option(help='Prompts to answer.')] = 32,
    tokens: Annotated[int, typer.Option(help='Tokens to generate for each.')] = 128,
    out: Annotated[Path | None, typer.Option(help='Write JSON there too.')] = None,
) -> None:
    """Print how many drafts the engine accepts on held-out text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = measure(folder, held_out_prompts(tokenizer, corpora.read(corpus), prompts), tokens, device)
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in found]))
    for row in found:
        rates = ', '.join(f'{rate:.1%}' for rate in row.rates)
        same = '' if row.same_answers is None else f'; {row.same_answers} of {row.prompts} answers as without drafts'
        typer.echo(
            f'{device} {row.dtype}, temperature {row.temperature:g}: '
            f'{row.mean_accepted:.2f} of {NUM_DRAFTS} drafts accepted ({rates}){same}'
        )


if __name__ == '__main__':
    typer.run(main)
