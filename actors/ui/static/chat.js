// A box to talk to the model: one session, streamed answers.

import { byId, element } from './dom.js';
import { rate, seconds } from './format.js';
import { askForKey, fetchWithKey } from './key.js';
import { events } from './sse.js';

let model = '';
let messages = [];
let session = newSession();
let running = null;

/** Tell the box which model it talks to. */
export function setModel(name) {
  model = name;
}

byId('chat-form').addEventListener('submit', (event) => {
  event.preventDefault();
  const content = byId('chat-input').value.trim();
  if (!content || running) return;
  byId('chat-input').value = '';
  messages.push({ role: 'user', content });
  bubble('user', content);
  answer();
});
byId('chat-input').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId('chat-form').requestSubmit();
  }
});
byId('chat-stop').addEventListener('click', () => running?.abort());
byId('chat-new').addEventListener('click', () => {
  running?.abort();
  messages = [];
  session = newSession();
  byId('chat-log').replaceChildren();
});

async function answer() {
  const [said, noted] = bubble('assistant', '');
  const mine = messages;
  running = new AbortController();
  busy(true);
  let content = '';
  try {
    content = await stream(running.signal, said, noted);
  } catch (error) {
    content = said.textContent;
    noted.textContent = error.name === 'AbortError' ? 'stopped' : error.message;
    noted.classList.toggle('error', error.name !== 'AbortError');
  } finally {
    running = null;
    busy(false);
  }
  // Without an answer the question is taken back too: roles have to take turns.
  if (content) mine.push({ role: 'assistant', content });
  else mine.pop();
}

async function stream(signal, said, noted) {
  const started = performance.now();
  const response = await post(signal);
  let first = 0;
  let usage = null;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage ?? usage;
    const delta = event.choices?.[0]?.delta;
    const piece = (delta?.reasoning_content ?? '') + (delta?.content ?? '');
    if (!piece) continue;
    first ||= performance.now();
    said.textContent += piece;
    follow();
  }
  const tokens = usage?.completion_tokens ?? 0;
  const spent = (performance.now() - first) / 1000;
  const speed = tokens > 1 && spent > 0 ? ` · ${rate((tokens - 1) / spent)} tokens/s` : '';
  if (first) noted.textContent = `${tokens} tokens · first after ${seconds((first - started) / 1000)}${speed}`;
  else noted.textContent = 'The model said nothing.';
  follow();
  return said.textContent;
}

async function post(signal) {
  const body = {
    model,
    messages,
    max_completion_tokens: Number(byId('chat-limit').value) || 256,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (;;) {
    const response = await fetchWithKey('v1/chat/completions', {
      method: 'POST',
      headers: { 'content-type': 'application/json', 'x-session-id': session },
      body: JSON.stringify(body),
      signal,
    });
    if (response.ok) return response;
    if (response.status !== 401) {
      const failure = await response.json().catch(() => null);
      throw new Error(failure?.error?.message ?? `The server answered ${response.status}.`);
    }
    await askForKey();
  }
}

function bubble(role, content) {
  const said = element('p', { class: 'said' }, content);
  const noted = element('p', { class: 'noted' });
  byId('chat-log').append(element('div', { class: 'bubble', 'data-role': role }, said, noted));
  follow();
  return [said, noted];
}

function busy(is) {
  byId('chat-stop').hidden = !is;
  byId('chat-send').disabled = is;
  byId('chat-log').setAttribute('aria-busy', String(is));
}

function follow() {
  const log = byId('chat-log');
  log.scrollTop = log.scrollHeight;
}

function newSession() {
  const random = crypto.getRandomValues(new Uint8Array(8));
  return `status-page-${Array.from(random, (byte) => byte.toString(16).padStart(2, '0')).join('')}`;
}
