// Light or dark: as the system has it until somebody chooses.

import { byId } from './dom.js';

const STORE = 'theme';
const system = matchMedia('(prefers-color-scheme: dark)');

byId('theme').addEventListener('click', () => {
  localStorage.setItem(STORE, current() === 'dark' ? 'light' : 'dark');
  apply();
});
system.addEventListener('change', apply);
apply();

function current() {
  return localStorage.getItem(STORE) ?? (system.matches ? 'dark' : 'light');
}

function apply() {
  document.documentElement.dataset.theme = current();
}
