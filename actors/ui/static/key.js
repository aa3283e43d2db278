// The API key: asked for when the server wants one, kept for this tab alone, sent with every request.

import { byId } from './dom.js';

const STORE = 'api-key';

/** fetch with the key, if there is one. */
export function fetchWithKey(url, options = {}) {
  const key = sessionStorage.getItem(STORE);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  return fetch(url, { ...options, headers });
}

/** Ask for a key, unless that is being done; resolves when there is one to try. */
export async function askForKey() {
  const dialog = byId('key-dialog');
  byId('key-open').hidden = false;
  if (!dialog.open) {
    byId('key-error').textContent = sessionStorage.getItem(STORE) ? 'This key is not valid.' : '';
    dialog.showModal();
  }
  await new Promise((resolve) => dialog.addEventListener('close', resolve, { once: true }));
}

byId('key-form').addEventListener('submit', () => {
  sessionStorage.setItem(STORE, byId('key-input').value.trim());
  byId('key-input').value = '';
});
byId('key-open').addEventListener('click', () => {
  byId('key-error').textContent = '';
  byId('key-dialog').showModal();
});
