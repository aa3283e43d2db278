// State memory of every rank as a picture: what is allocated, within what stock LMDeploy would allocate.

import { byId, element, svg, text } from './dom.js';
import { bytes } from './format.js';

const KINDS = ['checkpoint', 'ring', 'conv', 'cursor'];
const MEANINGS = {
  checkpoint: 'states, one per slot',
  ring: 'recent inputs to replay',
  conv: 'convolution states',
  cursor: 'positions in the ring',
};

/** Show the ranks of all replicas. */
export function showMemory(replicas) {
  const rows = replicas.flatMap((replica) => replica.ranks.map((rank) => ({ replica, ...rank, used: sum(rank) })));
  const used = rows.reduce((total, row) => total + row.used, 0);
  const stock = rows.reduce((total, row) => total + row.stock_bytes, 0);
  const saved = stock - used;
  text('saved', rows.length ? bytes(Math.abs(saved)) : '–');
  text('saved-note', rows.length ? `${saved < 0 ? 'more' : 'saved'} · ${share(saved, stock)}` : 'no rank has reported');

  const kinds = KINDS.filter((kind) => rows.some((row) => row.state_bytes[kind]));
  const items = kinds.map((kind) => {
    const total = rows.reduce((all, row) => all + (row.state_bytes[kind] ?? 0), 0);
    const name = element('b', {}, kind);
    return element('li', { 'data-kind': kind, title: MEANINGS[kind] }, name, ` ${bytes(total)}`);
  });
  if (rows.length) items.push(element('li', { 'data-kind': 'stock' }, element('b', {}, 'stock LMDeploy'), ` ${bytes(stock)}`));
  byId('kinds').replaceChildren(...items);

  const scale = Math.max(1, ...rows.map((row) => Math.max(row.used, row.stock_bytes)));
  byId('ranks').replaceChildren(...rows.map((row) => rankRow(row, scale, replicas.length > 1)));
}

function rankRow(row, scale, several) {
  const name = several ? `${row.replica.id} · rank ${row.rank}` : `rank ${row.rank}`;
  const label = `${name}: ${bytes(row.used)} of ${bytes(row.stock_bytes)}`;
  const picture = svg('svg', { class: 'rank-bar', role: 'img', 'aria-label': label });
  const percent = (value) => `${(100 * value) / scale}%`;
  picture.append(svg('rect', { class: 'stock', x: 0, y: 0, width: percent(row.stock_bytes), height: '100%', rx: 6 }));
  let at = 0;
  for (const kind of KINDS) {
    const size = row.state_bytes[kind] ?? 0;
    if (!size) continue;
    const title = svg('title', {}, `${kind}: ${bytes(size)}`);
    picture.append(svg('rect', { 'data-kind': kind, x: percent(at), y: 0, width: percent(size), height: '100%' }, title));
    at += size;
  }
  const figures = element('span', { class: 'rank-figures' }, `${bytes(row.used)} of ${bytes(row.stock_bytes)}`);
  return element('div', { class: 'rank' }, element('span', { class: 'rank-name' }, name), figures, picture);
}

const sum = (rank) => Object.values(rank.state_bytes).reduce((total, value) => total + value, 0);

function share(saved, stock) {
  return stock ? `${Math.round((100 * Math.abs(saved)) / stock)} % ${saved < 0 ? 'above' : 'below'} stock` : '';
}
