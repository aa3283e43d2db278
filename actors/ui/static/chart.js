// A line over the last minutes and bars of a histogram, as SVG.

import { svg } from './dom.js';
import { SPAN_S } from './history.js';

const WIDTH = 240;
const HEIGHT = 56;
const LEAST_SPAN_S = 20;
const GAP = 2;

/** Draw points [seconds before now, value] into `target`. */
export function draw(target, points, label) {
  const top = Math.max(1, ...points.map(([, value]) => value)) * 1.1;
  const span = Math.min(SPAN_S, Math.max(LEAST_SPAN_S, ...points.map(([at]) => -at)));
  const x = (at) => WIDTH * (1 + at / span);
  const y = (value) => HEIGHT - 2 - ((HEIGHT - 4) * value) / top;
  const line = points.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
  const chart = canvas(label);
  if (line.length > 1) {
    const [first, last] = [x(points[0][0]), x(points.at(-1)[0])];
    chart.append(
      svg('polygon', { class: 'area', points: `${first},${HEIGHT} ${line.join(' ')} ${last},${HEIGHT}` }),
      svg('polyline', { class: 'line', points: line.join(' ') }),
    );
  }
  target.replaceChildren(chart);
}

/** Draw a histogram's counts into `target`, without the empty buckets around them. */
export function drawBars(target, counts, label) {
  const chart = canvas(label);
  const first = counts.findIndex((value) => value > 0);
  if (first >= 0) {
    const shown = counts.slice(first, counts.findLastIndex((value) => value > 0) + 1);
    const width = Math.min(WIDTH / 4, WIDTH / shown.length);
    const top = Math.max(...shown);
    shown.forEach((value, i) => {
      const height = ((HEIGHT - 4) * value) / top;
      chart.append(svg('rect', { x: i * width, y: HEIGHT - 1 - height, width: width - GAP, height, rx: 2 }));
    });
  }
  target.replaceChildren(chart);
}

function canvas(label) {
  const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', role: 'img', 'aria-label': label };
  return svg('svg', box, svg('line', { class: 'base', x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }));
}
