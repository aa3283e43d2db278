"""Clients that know what every answer must be, and say what was wrong with it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from openai import APIError, APIStatusError, AsyncOpenAI

MODEL = 'demo'
LENGTH = 300
PATIENCE_S = 180.0
"""A request that has neither ended nor failed by then hangs."""


@dataclass(slots=True)
class Report:
    """Counts of what clients did and saw, and whatever must never happen."""

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def violate(self, what: str, detail: str) -> None:
        """Note something that must never happen."""
        self.violations[what] += 1
        if len(self.examples) < 10:
            self.examples.append(f'{what}: {detail}')


@dataclass(frozen=True, slots=True)
class Oracle:
    """A prompt and what an undisturbed greedy run says to it, `LENGTH` tokens long."""

    prompt: str
    text: str


class Truncated(Exception):
    """A stream ended without a finish reason and without an error."""


class Client:
    """Sends one request after the other: whole answers, streams, streams it hangs up on, stops, and what follows."""

    def __init__(self, api: AsyncOpenAI, name: str, oracles: list[Oracle], report: Report, seed: int) -> None:
        self._api = api
        self._name = name
        self._oracles = oracles
        self._report = report
        self._random = random.Random(seed)
        self._sessions = 0

    async def run(self, until: asyncio.Event) -> None:
        """Work until told to stop; the request in flight is finished first."""
        actions = {'whole': self._whole, 'stream': self._stream, 'disconnect': self._disconnect, 'stop': self._stop}
        while not until.is_set():
            kind = self._random.choice(list(actions))
            await self._guarded(kind, actions[kind](self._random.choice(self._oracles)))

    async def _guarded(self, kind: str, action: Any) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await action
            self._report.done[kind] += 1
        except TimeoutError:
            self._report.violate('hung', f'{kind} of {self._name}')
        except Truncated as error:
            self._report.violate('truncated', f'{kind}: {error}')
        except APIStatusError as error:
            if error.status_code not in (429, 503):
                self._report.violate('status', f'{kind}: {error.status_code} {error.message}')
            self._report.refused[str(error.status_code)] += 1
            await asyncio.sleep(self._random.uniform(0.2, 0.6))
        except APIError as error:
            # An error in words, in the middle of a stream or for want of a connection.
            self._report.failed[type(error).__name__] += 1
            if type(error) is not APIError:
                self._report.violate('connection', f'{kind}: {error!r}')

    async def _whole(self, oracle: Oracle) -> None:
        tokens = self._random.randint(1, LENGTH)
        answer = await self._ask(oracle.prompt, tokens)
        self._compare('whole', answer.choices[0].text, oracle.text, exact=False)
        if answer.usage.completion_tokens != tokens:
            self._report.violate('usage', f'{answer.usage.completion_tokens} of {tokens} tokens')
        if answer.choices[0].finish_reason != 'length':
            self._report.violate('finish_reason', str(answer.choices[0].finish_reason))

    async def _stream(self, oracle: Oracle) -> None:
        text, reason = await self._read(oracle.prompt, LENGTH, None)
        if reason is None:
            raise Truncated(f'after {len(text)} characters')
        self._compare('stream', text, oracle.text, exact=True)

    async def _disconnect(self, oracle: Oracle) -> None:
        session = self._new_session()
        text, _ = await self._read(oracle.prompt, LENGTH, self._random.randint(1, 5), user=session)
        self._compare('disconnect', text, oracle.text, exact=False)
        await self._continue(oracle, text, session)

    async def _stop(self, oracle: Oracle) -> None:
        session = self._new_session()
        begin = self._random.randrange(20, max(len(oracle.text) - 10, 21))
        stop = oracle.text[begin : begin + self._random.randint(2, 8)]
        answer = await self._ask(oracle.prompt, LENGTH, stop=[stop], user=session)
        text = answer.choices[0].text
        self._compare('stop', text, oracle.text[: oracle.text.index(stop)], exact=True)
        await self._continue(oracle, text, session)

    async def _continue(self, oracle: Oracle, text: str, session: str) -> None:
        answer = await self._ask(oracle.prompt + text, self._random.randint(1, 60), user=session)
        both = text + answer.choices[0].text
        shared = min(len(both), len(oracle.text))
        self._compare('continuation', both[:shared], oracle.text[:shared], exact=True)

    async def _ask(self, prompt: str, tokens: int, **options: Any) -> Any:
        return await self._api.completions.create(**request(prompt, tokens), **options)

    async def _read(self, prompt: str, tokens: int, chunks: int | None, **options: Any) -> tuple[str, str | None]:
        """Read a stream, or some chunks of it; return the text and the finish reason if it came."""
        stream = await self._api.completions.create(**request(prompt, tokens), stream=True, **options)
        text, reason, seen = '', None, 0
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.text
                reason = choice.finish_reason or reason
            seen += 1
            if seen == chunks:
                break
        await stream.close()
        return text, reason

    def _compare(self, kind: str, text: str, expected: str, exact: bool) -> None:
        if text != expected if exact else not expected.startswith(text):
            at = next((index for index, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), None)
            self._report.violate('wrong_tokens', f'{kind}: {len(text)} and {len(expected)} characters, first at {at}')

    def _new_session(self) -> str:
        self._sessions += 1
        return f'{self._name}-{self._sessions}'


def request(prompt: str, tokens: int) -> dict[str, Any]:
    """Return the arguments of a greedy completion that ends at `tokens` alone."""
    return {
        'model': MODEL,
        'prompt': prompt,
        'max_tokens': tokens,
        'temperature': 0,
        'extra_body': {'ignore_eos': True},
    }


async def ask_oracles(api: AsyncOpenAI, count: int) -> list[Oracle]:
    """Ask an undisturbed service, one request at a time."""
    prompts = [f'{number}. ' + 'It was a dark and stormy night; ' * (1 + 3 * (number % 4)) for number in range(count)]
    answers = [await api.completions.create(**request(prompt, LENGTH)) for prompt in prompts]
    return [Oracle(prompt, answer.choices[0].text) for prompt, answer in zip(prompts, answers, strict=True)]
