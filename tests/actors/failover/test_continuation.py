"""Answers that stop early, and what comes after: never another token than an undisturbed run has."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from ray import serve

from actors.messages import SessionStats
from actors.sessions import unpack
from tests.actors.service.conftest import MODEL, Service
from tests.actors.service.requests import ask, chat

PROMPT = 'Once upon a time there was a model that kept one state and replayed the rest. ' * 3
LENGTH = 160


async def complete(client: AsyncOpenAI, prompt: str, max_tokens: int, **options: Any) -> str:
    """Return the text of a greedy completion that ends at `max_tokens` alone."""
    got = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body={'ignore_eos': True}, **options
    )
    return got.choices[0].text


async def read_some(client: AsyncOpenAI, prompt: str, characters: int, **options: Any) -> str:
    """Read at least so many characters of a stream, hang up, and return all that came."""
    stream = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=1500,
        temperature=0,
        stream=True,
        extra_body={'ignore_eos': True},
        **options,
    )
    text = ''
    async for chunk in stream:
        text += chunk.choices[0].text
        if len(text) >= characters:
            break
    await stream.close()
    return text


async def history(session: str) -> list[int]:
    return unpack(await serve.get_deployment_handle('Router', 'test').history.remote(session))


def grown(before: SessionStats, after: SessionStats, reason: str) -> int:
    """Return how many sessions have lost state for a reason."""
    return after.invalidations_total.get(reason, 0) - before.invalidations_total.get(reason, 0)


async def test_what_follows_a_disconnect(client: AsyncOpenAI, service: Service) -> None:
    whole = await complete(client, PROMPT, 500)
    before = (await service.until_idle()).sessions
    text = await read_some(client, PROMPT, 60, user='hangs-up')
    stats = (await service.until_idle()).sessions
    assert grown(before, stats, 'disconnect') == 1
    kept = await history('hangs-up')
    rest = await complete(client, PROMPT + text, LENGTH, user='hangs-up')
    assert whole.startswith(text) and (text + rest) == whole[: len(text) + len(rest)]
    after = await history('hangs-up')
    assert after[: len(kept)] == kept, 'the tokens that the engine had generated, not others for the same text'
    assert len(after) >= len(kept) + LENGTH


async def test_what_follows_a_stop_string(client: AsyncOpenAI, service: Service) -> None:
    whole = await complete(client, PROMPT, LENGTH)
    stop = whole[80:84]
    before = (await service.until_idle()).sessions
    text = await complete(client, PROMPT, LENGTH, stop=[stop], user='stops')
    assert whole.startswith(text) and len(text) <= 80
    assert grown(before, (await service.until_idle()).sessions, 'stop_string') == 1
    rest = await complete(client, PROMPT + text, LENGTH - 80, user='stops')
    assert text + rest == whole[: len(text) + len(rest)]


@pytest.mark.parametrize('field', ['user', 'prompt_cache_key', 'header'])
async def test_a_message_is_continued(client: AsyncOpenAI, service: Service, field: str) -> None:
    name: dict[str, Any] = {'extra_headers': {'x-session-id': 'header'}} if field == 'header' else {field: field}
    whole = await ask(client, PROMPT, LENGTH)
    part = await ask(client, PROMPT, 50, **name)
    assert whole.text.startswith(part.text)
    request = chat(PROMPT, LENGTH - 50, **name)
    request['messages'].append({'role': 'assistant', 'content': part.text})
    request['extra_body']['continue_final_message'] = True
    rest = await client.chat.completions.create(**request)
    assert part.text + (rest.choices[0].message.content or '') == whole.text


async def test_nothing_to_continue(client: AsyncOpenAI) -> None:
    request = chat(PROMPT, 5)
    request['extra_body']['continue_final_message'] = True
    with pytest.raises(BadRequestError, match='continue_final_message'):
        await client.chat.completions.create(**request)


@pytest.mark.parametrize(
    'edit',
    [
        pytest.param(lambda text: text + ' And then?', id='extended'),
        pytest.param(lambda text: text[:100] + ' no ' + text[120:], id='edited'),
        pytest.param(lambda text: text[:150], id='shorter'),
        pytest.param(lambda text: 'Something else. ' + text, id='new'),
    ],
)
async def test_a_history_that_comes_back_changed(client: AsyncOpenAI, service: Service, edit: Any) -> None:
    text = await complete(client, PROMPT, LENGTH, user='edits')
    prompt = edit(PROMPT + text)
    expected = await complete(client, prompt, 60)
    assert await complete(client, prompt, 60, user='edits') == expected


async def test_state_is_reused_up_to_the_common_prefix(client: AsyncOpenAI, service: Service) -> None:
    prompt = PROMPT * 3  # several chunks: with drafts, LMDeploy restores only states that a cached block follows
    await complete(client, prompt, LENGTH, user='reuses')
    before = (await service.until_idle()).sessions
    text = await complete(client, prompt, LENGTH, user='reuses')
    await complete(client, prompt + text + ' More.', 10, user='reuses')
    after = (await service.until_idle()).sessions
    assert after.prefix_hits_total >= before.prefix_hits_total + 1
    assert after.reused_tokens_total > before.reused_tokens_total
    recomputed = sum(after.recomputed_tokens_total.values()) - sum(before.recomputed_tokens_total.values())
    assert recomputed > 0, 'drafts leave no state behind the last chunk of a prompt'


async def test_1000_sessions_leave_no_state_slot_behind(client: AsyncOpenAI, service: Service) -> None:
    from tests.actors.service.test_aborts import at_most

    stats = await service.until_idle()
    await at_most(8, [lambda n=n: ask(client, f'{n}', 2, user=f'many-{n}') for n in range(1000)])
    stats = await service.until_idle()
    assert sum(stats.sessions.by_state.values()) >= 1000
    assert stats.sessions.by_state['running'] == 0
    for worker in stats.workers:
        assert worker.engine is not None
        replay = worker.engine.replay
        assert replay.state_slots_used == replay.checkpoint_slots <= replay.state_slots
