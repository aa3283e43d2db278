"""Prompts of the engine tests and transformers' answers to them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import CheckpointFactory

# No length here, whole or cut into chunks of 64, leaves a last chunk of one or two tokens, whose convolution state
# LMDeploy saves wrongly.
PROMPTS = (
    'Hello world, this is a test.',
    'abcdefgh',
    'The quick brown fox jumps over the lazy dog. ' * 8,
    '1234567890-=' * 12,
    'xyz!',
    'Q: what?\nA:',
    'zzzz' * 40,
)
MAX_NEW_TOKENS = 32
MODELS = ('tiny', 'odd', 'moe')
# What float32 sums in another order can move a logit by, with room to spare.
MIN_MARGIN = 3e-4


@pytest.fixture(scope='session')
def greedy(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[list[int]]]:
    """Transformers' greedy tokens for PROMPTS by model, whose choices are all clear of ties."""
    folder = tmp_path_factory.mktemp('greedy')
    request, result = folder / 'request.json', folder / 'result.json'
    request.write_text(
        json.dumps(
            {
                'checkpoints': {name: str(checkpoint(name)) for name in MODELS},
                'generation': {'prompts': PROMPTS, 'max_new_tokens': MAX_NEW_TOKENS},
            }
        )
    )
    subprocess.run([sys.executable, Path(__file__).with_name('greedy_reference.py'), request, result], check=True)
    answers = json.loads(result.read_text())
    margins = {name: min(answer['margin'] for answer in answers[name]) for name in MODELS}
    assert min(margins.values()) > MIN_MARGIN, f'the demo models leave too little margin between tokens: {margins}'
    return {name: [answer['tokens'] for answer in answers[name]] for name in MODELS}
