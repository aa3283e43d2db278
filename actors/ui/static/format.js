// Numbers as people read them.

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

/** Bytes with three digits, such as "4.84 GiB". */
export function bytes(count) {
  let value = Math.abs(count);
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${count < 0 ? '−' : ''}${digits(value, unit === 0 ? 0 : 3)} ${UNITS[unit]}`;
}

/** Seconds, in milliseconds below one second. */
export function seconds(value) {
  if (value === null) return '–';
  return value < 1 ? `${digits(value * 1000, 3)} ms` : `${digits(value, 3)} s`;
}

/** A count with separators, such as "12,345". */
export function count(value) {
  return value === null ? '–' : Math.round(value).toLocaleString('en');
}

/** A rate with at most three digits. */
export function rate(value) {
  if (value === null) return '–';
  return value >= 100 ? count(value) : digits(value, 3);
}

/** How long ago, such as "5 s" or "3 min". */
export function age(value) {
  if (value < 60) return `${Math.max(0, Math.round(value))} s`;
  if (value < 3600) return `${Math.round(value / 60)} min`;
  return value < 86400 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}

/** A name with underscores as words. */
export function words(name) {
  return name.replaceAll('_', ' ');
}

function digits(value, significant) {
  if (significant === 0 || value >= 100) return Math.round(value).toLocaleString('en');
  return value === 0 ? '0' : value.toFixed(value >= 10 ? 1 : 2);
}
