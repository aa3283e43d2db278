// Elements without markup: all text, whoever wrote it, gets in as text.

const SVG = 'http://www.w3.org/2000/svg';

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; children are elements or text. */
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** Set an element's text if it is another one. */
export function text(id, value) {
  const target = byId(id);
  if (target.textContent !== value) target.textContent = value;
}

/** A share of a whole as a bar, with a text for those who do not see it. */
export function meter(label, used, total) {
  const bar = svg('svg', { class: 'meter', role: 'img', 'aria-label': `${label}: ${used} of ${total}` });
  bar.append(svg('rect', { class: 'track', width: '100%', height: '100%', rx: 3 }));
  if (used > 0) bar.append(svg('rect', { class: 'fill', width: `${(100 * used) / total}%`, height: '100%', rx: 3 }));
  return bar;
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
