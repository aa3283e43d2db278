"""Requests to a deployment, token ids in and out, through its router and workers as its ingress sends them."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field

import torch
from lmdeploy.messages import GenerationConfig
from ray import serve

from actors.config import AppConfig
from actors.dispatch import Dispatcher
from actors.messages import RouterStats

APPLICATION = 'bench'


@dataclass(slots=True)
class Answer:
    """One answer, and when it came: seconds from the request to the first and to the last token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0


class Client:
    """Asks for greedy answers of a fixed length."""

    def __init__(self, config: AppConfig) -> None:
        self._router = serve.get_deployment_handle('Router', APPLICATION)
        workers = serve.get_deployment_handle('Worker', APPLICATION)
        self._dispatcher = Dispatcher(self._router, workers, 'bench', config.router)

    async def stats(self) -> RouterStats:
        """Return the router's numbers."""
        stats: RouterStats = await self._router.stats.remote()
        return stats

    async def ask(self, prompt: list[int], tokens: int, logprobs: int | None = None) -> Answer:
        """Return one answer.

        Raises:
            RequestError: it was refused or failed.
            ValueError: it has another length.
        """
        config = GenerationConfig(max_new_tokens=tokens, ignore_eos=True, top_k=1, logprobs=logprobs)
        answer, begin = Answer(), time.perf_counter()
        async for event in await self._dispatcher.open(prompt, config):
            if event.token_ids:
                answer.last_s = time.perf_counter() - begin
                answer.first_s = answer.first_s or answer.last_s
            answer.tokens += event.token_ids
            answer.logprobs += event.logprobs or []
        if len(answer.tokens) != tokens:
            raise ValueError(f'answer: expected {tokens} tokens, got {len(answer.tokens)}')
        return answer

    async def ask_all(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """Ask for all answers at once; output tokens per second, mean TTFT and mean TPOT."""
        begin = time.perf_counter()
        answers = await asyncio.gather(*(self.ask(prompt, tokens) for prompt in prompts))
        elapsed_s = time.perf_counter() - begin
        return {
            'output_tokens_per_s': len(prompts) * tokens / elapsed_s,
            'ttft_s': sum(answer.first_s for answer in answers) / len(answers),
            'tpot_s': sum((a.last_s - a.first_s) / max(tokens - 1, 1) for a in answers) / len(answers),
            'elapsed_s': elapsed_s,
        }


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of `length` tokens."""
    generator = torch.Generator().manual_seed(seed)
    low = min(100, vocabulary // 4)
    return torch.randint(low, min(vocabulary, 150_000), (count, length), generator=generator).tolist()


class MemoryPeak(threading.Thread):
    """Polls the used memory of every GPU, by default every 20 ms; without NVIDIA's driver there is nothing to see."""

    def __init__(self, period_s: float = 0.02) -> None:
        super().__init__(daemon=True)
        self._period_s = period_s
        self.peak_bytes: list[int] = []

    def run(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        self.peak_bytes = [0] * len(handles)
        while True:
            for index, handle in enumerate(handles):
                used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
                self.peak_bytes[index] = max(self.peak_bytes[index], used)
            time.sleep(self._period_s)
