"""The status page in a browser, against a deployment that asks for a key and whose model has a hostile name."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from playwright.async_api import Browser, BrowserContext, Page, Route, async_playwright, expect

from tests.actors.secure.conftest import KEY, MODEL, Secured
from tests.patience import LIVENESS_S
from tests.tools import tool

HOSTILE = '<img src=x onerror="document.title=\'run\'"><script>document.title="run"</script>'
PATIENCE_MS = LIVENESS_S * 1000
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        made = await playwright.chromium.launch(executable_path=tool('chromium'), args=['--no-sandbox'])
        yield made
        await made.close()


@dataclass(slots=True)
class Watched:
    """A page, and what must stay empty: complaints of the browser, and requests to other hosts."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


async def open_page(browser: Browser, secured: Secured, key: str | None = KEY, **options: Any) -> Watched:
    """Open the page in a context of its own, and give it a key unless there is none to give."""
    context: BrowserContext = await browser.new_context(ignore_https_errors=True, **options)
    context.set_default_timeout(PATIENCE_MS)
    watched = Watched(await context.new_page())
    host = urlsplit(secured.url).netloc
    # The answer that makes the page ask for a key is the one complaint that there may be.
    watched.page.on('console', lambda said: said.type == 'error' and '401' not in said.text
                    and watched.complaints.append(said.text))  # fmt: skip
    watched.page.on('pageerror', lambda error: watched.complaints.append(str(error)))
    watched.page.on('request', lambda request: urlsplit(request.url).netloc != host
                    and watched.elsewhere.append(request.url))  # fmt: skip
    await watched.page.goto(f'{secured.url}/ui')
    if key is not None:
        await enter_key(watched.page, key)
        await expect(watched.page.locator('#connection')).to_have_text('1 of 1 replica ready')
    return watched


async def enter_key(page: Page, key: str) -> None:
    await page.fill('#key-input', key)
    await page.click('#key-form button')


async def number(page: Page, selector: str) -> float:
    """Return the number that an element begins with, 0 for none."""
    found = re.match(r'[\d,.]+', await page.locator(selector).inner_text())
    return float(found[0].replace(',', '')) if found else 0.0


async def test_it_shows_the_numbers_of_the_engine(
    browser: Browser, secured: Secured, http: aiohttp.ClientSession
) -> None:
    watched = await open_page(browser, secured)
    page = watched.page
    async with http.get('/ui/state', headers={'x-api-key': KEY}) as response:
        state = await response.json()
    (replica,) = state['replicas']
    (rank,) = replica['ranks']
    used, stock = sum(rank['state_bytes'].values()), rank['stock_bytes']
    await expect(page.locator('#saved-note')).to_have_text(
        f'saved · {round(100 * (stock - used) / stock)} % below stock'
    )
    assert used < stock
    await expect(page.locator('.rank-bar [data-kind]')).to_have_count(4)
    await expect(page.locator('.replica code')).to_have_text(replica['id'])
    await expect(page.locator('#model')).to_have_text(MODEL)
    assert (watched.complaints, watched.elsewhere) == ([], [])


async def test_numbers_follow_the_load(browser: Browser, secured: Secured, http: aiohttp.ClientSession) -> None:
    page = (await open_page(browser, secured)).page
    body = {'model': MODEL, 'messages': [{'role': 'user', 'content': 'hello'}], 'ignore_eos': True, 'stream': True}
    headers = {'x-api-key': KEY, 'x-session-id': 'load'}
    async with http.post('/v1/chat/completions', json=body, headers=headers) as response:
        await expect(page.locator('#rate')).to_have_text(re.compile(r'[1-9]'))
        await expect(page.locator('#rate-chart polyline')).to_be_visible()
        async for _ in response.content:
            pass
    await expect(page.locator('#tpot-p50')).to_have_text(re.compile(r'[1-9].* m?s'))
    await expect(page.locator('#ttft-chart rect').first).to_be_attached()
    assert await number(page, '#totals') >= 1
    # A stop among drafts, or the end of the request itself, gives up what the engine knows of the session.
    async with http.post('/v1/chat/completions', json=body, headers=headers) as response:
        await response.content.readline()
    await expect(page.locator('#invalidations li').first).to_contain_text('disconnect')
    await expect(page.locator('#invalidations time').first).to_have_text(re.compile(r'^\d+ (s|min) ago$'))
    await expect(page.locator('#sessions')).to_contain_text(re.compile(r'[1-9]\d* (cold|resident)'))


async def test_the_chat_box_streams(browser: Browser, secured: Secured) -> None:
    watched = await open_page(browser, secured)
    page = watched.page
    await page.fill('#chat-limit', '40')
    await page.fill('#chat-input', 'hello')
    await page.press('#chat-input', 'Enter')
    answer = page.locator('[data-role=assistant]').first
    await expect(answer.locator('.noted')).to_have_text(re.compile(r'^\d+ tokens · first after .*s'))
    assert await answer.locator('.said').inner_text()
    await page.fill('#chat-input', 'and then?')
    await page.click('#chat-send')
    await expect(page.locator('[data-role=assistant] .noted:not(:empty)')).to_have_count(2)
    await expect(page.locator('[data-role=user] .said')).to_have_text(['hello', 'and then?'])
    await page.click('#chat-new')
    await expect(page.locator('.bubble')).to_have_count(0)
    assert (watched.complaints, watched.elsewhere) == ([], [])


async def test_an_answer_can_be_stopped(browser: Browser, secured: Secured) -> None:
    page = (await open_page(browser, secured)).page

    async def endless(route: Route) -> None:
        await asyncio.sleep(0.2)
        await route.continue_(post_data=json.dumps({**route.request.post_data_json, 'ignore_eos': True}))

    await page.route('**/v1/chat/completions', endless)
    await page.fill('#chat-limit', '32000')
    await page.fill('#chat-input', 'hello')
    await page.click('#chat-send')
    await page.click('#chat-stop')
    await expect(page.locator('[data-role=assistant] .noted')).to_have_text('stopped')
    await expect(page.locator('#chat-send')).to_be_enabled()


async def test_it_asks_for_a_key_and_keeps_it_in_this_tab(browser: Browser, secured: Secured) -> None:
    page = (await open_page(browser, secured, key=None)).page
    await expect(page.locator('#key-dialog')).to_be_visible()
    await expect(page.locator('#ranks')).to_be_empty()
    await enter_key(page, 'wrong')
    await expect(page.locator('#key-error')).to_have_text('This key is not valid.')
    await enter_key(page, KEY)
    await expect(page.locator('#connection')).to_have_text('1 of 1 replica ready')
    await page.reload()
    await expect(page.locator('#connection')).to_have_text('1 of 1 replica ready')
    state = await page.context.storage_state()
    assert KEY not in json.dumps(state)
    other = await page.context.new_page()
    await other.goto(page.url)
    await expect(other.locator('#key-dialog')).to_be_visible()


async def test_what_others_wrote_stays_text(browser: Browser, secured: Secured) -> None:
    watched = await open_page(browser, secured)
    page = watched.page
    pieces = [{'choices': [{'delta': {'content': HOSTILE}}]}, {'choices': [], 'usage': {'completion_tokens': 9}}]
    stream = ''.join(f'data: {json.dumps(piece)}\n\n' for piece in pieces) + 'data: [DONE]\n\n'
    await page.route(
        '**/v1/chat/completions', lambda route: route.fulfill(body=stream, content_type='text/event-stream')
    )
    await page.fill('#chat-input', HOSTILE)
    await page.click('#chat-send')
    await expect(page.locator('.said')).to_have_text([HOSTILE, HOSTILE])
    await expect(page.locator('main img, main script')).to_have_count(0)
    await expect(page).to_have_title(f'{MODEL} · status')
    assert (watched.complaints, watched.elsewhere) == ([], [])


async def test_errors_are_told(browser: Browser, secured: Secured) -> None:
    page = (await open_page(browser, secured)).page
    await page.fill('#chat-input', 'x' * 5000)
    await page.click('#chat-send')
    await expect(page.locator('[data-role=assistant] .noted.error')).to_contain_text('context')


@pytest.mark.parametrize('system', ['light', 'dark'])
async def test_light_and_dark(browser: Browser, secured: Secured, system: Any) -> None:
    page = (await open_page(browser, secured, color_scheme=system)).page
    root, other = page.locator('html'), 'light' if system == 'dark' else 'dark'
    await expect(root).to_have_attribute('data-theme', system)
    await page.click('#theme')
    await expect(root).to_have_attribute('data-theme', other)
    await page.reload()
    await expect(root).to_have_attribute('data-theme', other)


@pytest.mark.parametrize('width', [320, 390, 768, 1440])
async def test_it_fits_the_screen(browser: Browser, secured: Secured, width: int) -> None:
    page = (await open_page(browser, secured, viewport={'width': width, 'height': 800})).page
    await expect(page.locator('.rank-bar')).to_be_visible()
    assert await page.evaluate('document.documentElement.scrollWidth') <= width


async def test_nothing_inline_may_run(http: aiohttp.ClientSession) -> None:
    async with http.get('/ui') as response:
        policy, page = response.headers['content-security-policy'], await response.text()
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert 'unsafe' not in policy
    assert re.findall(r'<script(?! type="module" src="ui/)|<style|\son\w+=|\sstyle=|https?://', page) == []
