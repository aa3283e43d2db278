"""Prompts and last chunks shorter than the convolution, in the whole engine against transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from lmdeploy.pytorch.engine import Engine

from replayssm import demo
from replayssm.patch import conv_tail

from .engine import EngineOptions, generate, random_prompt, running
from .reference import greedy_answers
from .scheduling import STOCK_AND_FIXED, installed

pytestmark = pytest.mark.asyncio(loop_scope='module')

MODEL = 'odd'
CHUNK = 64
NUM_TOKENS = 8
LENGTHS = (1, 2, 3, 4, 64, 65, 66, 67, 129, 130, 131)
SHORT_TAIL = {1, 2, 65, 66, 129, 130}
"""Lengths whose last chunk has fewer tokens than the convolution looks back."""

PROMPTS = [random_prompt(length) for length in LENGTHS]


@pytest.fixture(scope='module')
def reference() -> list[list[int]]:
    return greedy_answers(demo.ensure(MODEL), PROMPTS, NUM_TOKENS)


@pytest_asyncio.fixture(scope='module', loop_scope='module', params=[0, 3], ids=['plain', 'mtp3'])
async def engine(request: pytest.FixtureRequest, cpu_device: None) -> AsyncIterator[Engine]:
    options = EngineOptions(MODEL, num_drafts=request.param, max_prefill_tokens=CHUNK)
    async with running(options) as engine:
        yield engine


@STOCK_AND_FIXED
@pytest.mark.parametrize('together', [False, True], ids=['alone', 'in-one-batch'])
async def test_short_chunks_give_the_reference_answer(
    engine: Engine, reference: list[list[int]], together: bool, fixed: bool
) -> None:
    with installed(conv_tail, when=fixed):
        if together:
            answers = await generate(engine, PROMPTS, NUM_TOKENS)
        else:
            answers = [(await generate(engine, [prompt], NUM_TOKENS))[0] for prompt in PROMPTS]
    wrong = {n for n, answer, expected in zip(LENGTHS, answers, reference, strict=True) if answer != expected}
    assert wrong == (set() if fixed else SHORT_TAIL)
