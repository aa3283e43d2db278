// Asks for the numbers every second and shows them.

import './theme.js';
import { draw, drawBars } from './chart.js';
import { setModel } from './chat.js';
import { byId, text } from './dom.js';
import { count, rate, seconds } from './format.js';
import { History } from './history.js';
import { askForKey, fetchWithKey } from './key.js';
import { showMemory } from './memory.js';
import { showInvalidations, showReplicas, showSessions } from './panels.js';

const PERIOD_MS = 1000;
const PATIENCE_MS = 5000;
const LATENCIES = [['ttft', 'Time to first token'], ['tpot', 'Time per output token']];
const history = new History();

async function poll() {
  for (;;) {
    try {
      const response = await fetchWithKey('ui/state', { signal: AbortSignal.timeout(PATIENCE_MS) });
      if (response.status === 401) {
        connection('waiting', 'needs an API key');
        await askForKey();
        continue;
      }
      if (!response.ok) throw new Error(`the server answered ${response.status}`);
      show(await response.json());
    } catch (error) {
      connection('lost', error.name === 'TimeoutError' ? 'the router does not answer' : 'connection lost');
    }
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
}

function show(state) {
  history.add(state);
  document.title = `${state.model} · status`;
  text('model', state.model);
  setModel(state.model);
  showConnection(state.replicas);
  showMemory(state.replicas);
  showLoad(state);
  for (const [name, title] of LATENCIES) showLatency(name, title);
  showReplicas(state.replicas);
  showSessions(state.sessions);
  showInvalidations(state.sessions.recent, state.time_s);
  showTotals(state.requests);
}

function showConnection(replicas) {
  const ready = replicas.filter((replica) => replica.state === 'ready').length;
  if (ready) connection('ready', `${ready} of ${replicas.length} ${replicas.length === 1 ? 'replica' : 'replicas'} ready`);
  else connection('waiting', replicas.some((replica) => replica.state === 'failed') ? 'no replica is ready' : 'loading');
}

function showLoad(state) {
  const rates = history.tokenRates();
  text('rate', rate(rates.at(-1)?.[1] ?? null));
  draw(byId('rate-chart'), rates, 'Generated tokens per second, the last two minutes');
  const { running, queued, queued_tokens: tokens } = state.requests;
  text('running', count(running));
  text('queue', queued ? `running · ${count(queued)} waiting, ${count(tokens)} tokens` : 'running · none waiting');
  const points = history.points((one) => one.requests.running + one.requests.queued);
  draw(byId('running-chart'), points, 'Requests running and waiting, the last two minutes');
}

function showLatency(name, title) {
  const { isRecent, counts, values } = history.latency(name, [0.5, 0.99]);
  text(`${name}-p50`, seconds(values[0]));
  text(`${name}-p99`, seconds(values[1]));
  const span = values[0] === null ? 'no request has ended' : isRecent ? 'last minute' : 'since the start';
  text(`${name}-span`, values[0] === null ? span : `median, ${span}`);
  drawBars(byId(`${name}-chart`), counts, `${title}, distribution`);
}

function showTotals(requests) {
  const sum = (counts) => Object.values(counts).reduce((total, value) => total + value, 0);
  const parts = [
    `${count(sum(requests.finished_total))} requests ended`,
    `${count(sum(requests.rejected_total))} refused`,
    `${count(sum(requests.resumed_total))} resumed elsewhere`,
  ];
  text('totals', parts.join(' · '));
}

function connection(state, message) {
  byId('connection').dataset.state = state;
  text('connection', message);
}

poll();
