// Replicas, sessions and what happened to them.

import { byId, element, meter, svg } from './dom.js';
import { age, count, words } from './format.js';

const SESSION_STATES = ['running', 'resident', 'cold'];
const EVENTS = 6;

/** Show one block per replica. */
export function showReplicas(replicas) {
  const blocks = replicas.map((replica) => {
    const head = element(
      'div',
      { class: 'replica-head' },
      element('span', { class: 'state', 'data-state': replica.state }, replica.state),
      element('code', {}, replica.id),
      element('span', { class: 'hint' }, replica.ranks.length === 1 ? '1 rank' : `${replica.ranks.length} ranks`),
    );
    const rows = [
      ['sequences', replica.running, replica.capacity],
      ['state slots', replica.state_slots_used, replica.state_slots],
      ['KV blocks', replica.kv_blocks_used, replica.kv_blocks],
    ].filter(([, used, total]) => used !== null && total > 0);
    const cells = rows.flatMap(([name, used, total]) => [
      element('span', {}, name),
      meter(name, used, total),
      element('span', { class: 'number' }, `${count(used)} / ${count(total)}`),
    ]);
    const block = element('div', { class: 'replica' }, head, element('div', { class: 'meters' }, ...cells));
    if (replica.message) block.append(element('p', { class: 'error' }, replica.message));
    return block;
  });
  byId('replicas').replaceChildren(...(blocks.length ? blocks : [empty('No replica has reported.')]));
}

/** Show named sessions by state, and what was reused and computed again. */
export function showSessions(sessions) {
  const total = SESSION_STATES.reduce((sum, state) => sum + (sessions.by_state[state] ?? 0), 0);
  const bar = svg('svg', { class: 'session-bar', role: 'img', 'aria-label': `${total} sessions` });
  bar.append(svg('rect', { class: 'track', width: '100%', height: '100%', rx: 6 }));
  let at = 0;
  const items = SESSION_STATES.map((state) => {
    const size = sessions.by_state[state] ?? 0;
    if (size) {
      const place = { x: `${(100 * at) / total}%`, width: `${(100 * size) / total}%`, height: '100%' };
      bar.append(svg('rect', { 'data-session': state, ...place }));
    }
    at += size;
    return element('li', { 'data-session': state }, element('b', {}, count(size)), ` ${state}`);
  });
  const computed = Object.values(sessions.recomputed_tokens_total).reduce((sum, value) => sum + value, 0);
  const reused = element('p', { class: 'hint' }, `${count(sessions.reused_tokens_total)} prompt tokens reused, ` +
    `${count(computed)} of known history computed again`);
  byId('sessions').replaceChildren(bar, element('ul', { class: 'legend' }, ...items), reused);
}

/** Show the newest invalidations. */
export function showInvalidations(recent, now) {
  const items = recent.slice(0, EVENTS).map((event) => element(
    'li',
    {},
    element('span', {}, words(event.reason)),
    element('span', { class: 'hint' }, event.count === 1 ? '1 session' : `${count(event.count)} sessions`),
    element('time', {}, `${age(now - event.time_s)} ago`),
  ));
  byId('invalidations').replaceChildren(...(items.length ? items : [empty('None so far.', 'li')]));
}

const empty = (message, name = 'p') => element(name, { class: 'hint' }, message);
