"""LMDeploy's whole engine on CPU tensors, one session at a time or many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lmdeploy.messages import PytorchEngineConfig, ResponseType, SpeculativeConfig
from lmdeploy.pytorch.engine import Engine
from lmdeploy.pytorch.engine.request import RequestType
from lmdeploy.pytorch.messages import SamplingParam

from replayssm import demo

VOCABULARY = range(20, 250)
"""Plain byte tokens of the demo models."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What differs between the engines of these tests; the defaults never preempt and never split a prompt.

    Attributes:
        folder: A checkpoint other than the demo model's own.
    """

    model: str = 'tiny'
    num_drafts: int = 0
    num_blocks: int = 400
    max_batch_size: int = 8
    max_prefill_tokens: int = 1024
    prefix_states: int = 0
    prefix_interval: int = 0
    tp: int = 1
    dtype: str = 'float32'
    prefill_interval: int = 16
    folder: Path | None = None

    def build(self) -> Engine:
        config = PytorchEngineConfig(
            device_type='cpu',
            dtype=self.dtype,
            tp=self.tp,
            distributed_executor_backend='ray' if self.tp > 1 else None,
            block_size=16,
            num_gpu_blocks=self.num_blocks,
            max_batch_size=self.max_batch_size,
            max_prefill_token_num=self.max_prefill_tokens,
            prefill_interval=self.prefill_interval,
            session_len=4096,
            enable_prefix_caching=self.prefix_states > 0,
            prefix_cache_state_budget=self.prefix_states,
            prefix_cache_decode_state_interval=self.prefix_interval,
        )
        method = 'deepseek_mtp' if self.model.startswith('glm') else 'qwen3_5_mtp'
        drafts = SpeculativeConfig(method, num_speculative_tokens=self.num_drafts) if self.num_drafts else None
        folder = self.folder or demo.ensure(self.model)
        return Engine.from_pretrained(str(folder), engine_config=config, speculative_config=drafts)


class Session:
    """A conversation in one engine session, spoken in raw requests: the engine keeps the history of all turns."""

    def __init__(self, engine: Engine, session_id: int) -> None:
        self._engine = engine
        self._sender = engine.req_manager.build_sender()
        self.session_id = session_id

    @property
    def sequences(self) -> Sequence[Any]:
        """The scheduler's sequences of this session: one, or none before the first message has arrived."""
        return tuple(self._engine.scheduler.sessions[self.session_id].sequences.values())

    @property
    def sequence(self) -> Any:
        """The scheduler's sequence of this session."""
        (sequence,) = self.sequences
        return sequence

    @property
    def is_open(self) -> bool:
        return self.session_id in self._engine.scheduler.sessions

    async def say(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        stop_words: Sequence[int] = (),
        leave_after: int | None = None,
        leave_by: RequestType = RequestType.STOP_SESSION,
    ) -> list[int]:
        """Append input and return the answer; after `leave_after` tokens or more a request cuts it short."""
        if not self.is_open:
            await self._sender.async_send(RequestType.ADD_SESSION, {'session_id': self.session_id})
        sampling = SamplingParam(
            top_k=1, temperature=1.0, max_new_tokens=max_new_tokens, stop_words=list(stop_words), ignore_eos=True
        )
        message = {
            'token_ids': list(token_ids),
            'session_id': self.session_id,
            'sampling_param': sampling,
            'adapter_name': None,
        }
        response = self._sender.send_async(RequestType.ADD_MESSAGE, message)
        answer: list[int] = []
        while True:
            response = await self._sender.async_recv(response, wait_main=True)
            if response.data is not None:
                answer = response.data['token_ids'].tolist()
            if response.type is not ResponseType.SUCCESS:
                assert response.type in (ResponseType.FINISH, ResponseType.CANCEL), response
                return answer
            if leave_after is not None and len(answer) >= leave_after:
                sequence = self.sequence
                await self._sender.async_send(leave_by, {'session_id': self.session_id})
                return list(sequence.generated_ids.tolist())

    async def end(self) -> None:
        await self._sender.async_send(RequestType.END_SESSION, {'session_id': self.session_id})


@asynccontextmanager
async def running(options: EngineOptions) -> AsyncIterator[Engine]:
    """Run an engine in this event loop."""
    engine = options.build()
    engine.start()
    # LMDeploy never ends a loop that is closed before it has begun, as by a test that fails at once.
    while engine._loop_main is None:
        await asyncio.sleep(0)
    try:
        yield engine
    finally:
        engine.close()
        await asyncio.gather(engine.wait_tasks(), return_exceptions=True)


async def generate(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Return the greedy answers of `num_tokens` tokens each, all prompts at once."""
    sessions = [Session(engine, 1000 + index) for index in range(len(prompts))]

    async def answer(session: Session, prompt: Sequence[int]) -> list[int]:
        tokens = await session.say(prompt, num_tokens)
        await session.end()
        return tokens

    return list(await asyncio.gather(*map(answer, sessions, prompts)))


@contextmanager
def few_blocks(engine: Engine, num_blocks: int) -> Iterator[None]:
    """Leave an idle engine `num_blocks` KV blocks."""
    manager = engine.scheduler.block_manager
    held = manager.allocator.allocate(manager.get_num_free_gpu_blocks() - num_blocks, 'gpu')
    try:
        yield
    finally:
        manager.allocator.free(held)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng([seed, length])
    return rng.choice(list(VOCABULARY), size=length).tolist()
