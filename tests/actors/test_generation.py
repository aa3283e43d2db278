"""How an answer goes on elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from lmdeploy.messages import GenerationConfig

from actors.generation import Generation
from actors.messages import TokenEvent


def generation(delivered: int = 0, **options: Any) -> Generation:
    made = Generation([1, 2, 3], GenerationConfig(**({'max_new_tokens': 10} | options)))
    if delivered:
        made.take(TokenEvent(list(range(10, 10 + delivered))))
    return made


def test_the_next_worker_gets_what_was_delivered_and_what_is_left() -> None:
    target = generation(4, random_seed=7)
    assert target.input_ids == [1, 2, 3, 10, 11, 12, 13]
    assert (target.prompt_tokens, target.delivered, target.remaining) == (3, 4, 6)
    assert (target.gen_config.max_new_tokens, target.gen_config.random_seed) == (6, 7)


@pytest.mark.parametrize(('asked', 'left'), [(None, None), (0, 0), (3, 0), (9, 5)])
def test_the_least_number_of_tokens_counts_from_the_start(asked: int | None, left: int | None) -> None:
    assert generation(4, min_new_tokens=asked).gen_config.min_new_tokens == left


def test_what_a_client_keeps_ends_where_it_stopped() -> None:
    assert generation(4).kept(2) == [1, 2, 3, 10, 11]


@pytest.mark.parametrize(
    ('options', 'obstacle'),
    [
        ({}, None),
        ({'response_format': {'type': 'json_object'}}, 'response_format'),
        ({'repetition_penalty': 1.1}, 'repetition_penalty'),
        ({'repetition_ngram_size': 3, 'repetition_ngram_threshold': 2}, 'repetition_ngram_size'),
        ({'logits_processors': [lambda ids, logits: logits]}, 'logits_processors'),
        ({'random_seed': 3, 'temperature': 0.7, 'do_sample': True, 'bad_token_ids': [5]}, None),
    ],
)
def test_options_that_look_back_at_the_answer_stand_in_the_way(options: dict[str, Any], obstacle: str | None) -> None:
    assert generation(4, **options).obstacle() == obstacle
    assert generation(0, **options).obstacle() is None, 'an answer that has not begun can begin anywhere'
