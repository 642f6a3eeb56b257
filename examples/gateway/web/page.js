import { createClient } from '/ratelimit.js';

const { limit, costHeader } = document.getElementById('gateway').dataset;
const [left, level, answer] = ['left', 'level', 'answer'].map((id) => document.getElementById(id));
const limits = createClient({ url: '/limits' });
let wanted = 0; // the cost that was refused last, until something else was asked

limits.subscribe(() => { // after each poll, and four times a second
  const now = limits.check(limit, wanted);
  if (!now) return;
  left.value = Math.floor(now.remaining);
  level.value = now.remaining;
  if (wanted === 0) return;
  answer.textContent = now.ok ? `Try again: ${wanted} can be had.` : `Refused: ${wanted} can be had in ${Math.ceil(now.retryAfterUs / 1e6)} s.`;
});

document.querySelector('.buttons').addEventListener('click', async ({ target }) => {
  const cost = Number(target.dataset.cost ?? 0);
  if (cost === 0) return; // beside the buttons
  try {
    const response = await fetch('/v1/spend', { method: 'POST', headers: { [costHeader]: cost, Accept: 'application/json' } });
    wanted = response.status === 429 ? cost : 0;
    if (response.ok) answer.textContent = `Spent ${cost}.`;
    else if (wanted > 0) answer.textContent = `Refused: try again in ${response.headers.get('Retry-After')} s.`;
    else answer.textContent = `The gateway answered ${response.status}.`;
  } catch {
    answer.textContent = 'The gateway cannot be reached.';
  }
  limits.refresh();
});
