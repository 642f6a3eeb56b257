// What a page shows of a bucket, kept up to date, and forms that are sent once. The numbers and the curve are computed between two polls by the
// module that computes as the server does. Without this script the page says what was so when it was loaded.
import { createClient, evaluate } from './ratelimit.js';

const POLL_MS = 2000, REFRESH_MS = 5000;
const WIDTH = 720, HEIGHT = 200, STEPS = 180; // as the server draws
const SHORTEST = 10e6, LONGEST = 30 * 86_400e6; // of the time ahead, in microseconds
const MOST_SAMPLES = 2000;

// A change is sent once, however often its button is pressed while the answer is on its way.
for (const form of document.querySelectorAll('form[method=post]')) {
  form.addEventListener('submit', (event) => {
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = 'yes';
  });
}
addEventListener('pageshow', () => { // a page that comes back from memory may be used again
  for (const form of document.querySelectorAll('form[data-sent]')) delete form.dataset.sent;
});

// The numbers of a bar are below its chart: of the one under the pointer, or the one that the arrow keys go to.
document.addEventListener('pointerover', (event) => tell(event.target.closest?.('.bars'), event.target));
document.addEventListener('keydown', (event) => {
  const figure = event.target.closest?.('.bars');
  const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
  if (!figure || !step) return;
  event.preventDefault();
  const hits = [...figure.querySelectorAll('.hit')];
  const at = hits.findIndex((hit) => hit.matches('.chosen'));
  tell(figure, hits[Math.min(Math.max((at < 0 ? hits.length : at) + step, 0), hits.length - 1)]);
});

function tell(figure, hit) {
  if (!figure) return;
  figure.querySelector('.chosen')?.classList.remove('chosen');
  hit.classList.toggle('chosen', hit.matches('.hit'));
  figure.querySelector('output').textContent = hit.querySelector('title')?.textContent ?? '';
}

for (const section of document.querySelectorAll('[data-live]')) follow(section);

// Lists and charts of what happens now are replaced by those of a new load, unless somebody is using them.
const fresh = document.querySelectorAll('[data-refresh]');
if (fresh.length > 0) setInterval(refresh, REFRESH_MS);

async function refresh() {
  if (document.hidden) return;
  const response = await fetch(location.href).catch(() => null);
  if (!response?.ok) return;
  const page = new DOMParser().parseFromString(await response.text(), 'text/html');
  for (const part of fresh) {
    const next = page.querySelector(`[data-refresh="${part.dataset.refresh}"]`);
    if (next && !part.matches(':hover, :focus-within')) part.replaceChildren(...next.childNodes);
  }
}

/** Polls the bucket of a section, and draws it. @param {HTMLElement} section */
function follow(section) {
  const limit = section.dataset.limit;
  const client = createClient({ url: section.dataset.live, pollMs: POLL_MS });
  const figure = (name) => section.querySelector(`[data-figure="${name}"]`);
  const live = section.querySelector('.live');
  let past = []; // [instant, tokens], as they were seen
  let ahead = SHORTEST;

  client.subscribe(() => {
    const state = client.state(limit);
    if (!state && client.error === null) return; // before the first answer the page says what it was loaded with
    live.hidden = false;
    live.classList.toggle('stale', client.error !== null || !state);
    figure('state').textContent = client.error || !state ? 'not up to date' : 'live';
    if (!state) return;
    const now = client.serverNow();
    const { tokens, resetAfterUs } = evaluate(state, now, 0);
    ahead = Math.min(Math.max(ahead, resetAfterUs * 1.25), LONGEST);
    const from = now - ahead / 2;
    if (past.length === 0) past = sampled(state, Math.max(state.ts_us, from), now);
    past.push([now, tokens]);
    past = past.filter(([at], i) => at >= from && (past.length < MOST_SAMPLES || i % 2 === 0));

    const one = Math.min(1, state.capacity);
    const wait = one > 0 ? evaluate(state, now, one).retryAfterUs : 0;
    section.dataset.tokens = tokens;
    section.dataset.at = now;
    figure('tokens').textContent = number(tokens);
    figure('tokens').parentElement.classList.toggle('owes', tokens < 0);
    figure('full').textContent = resetAfterUs > 0 ? span(resetAfterUs) : 'full';
    figure('capacity').textContent = number(state.capacity);
    figure('one').textContent = section.dataset.gives || (wait > 0 ? span(wait) : 'now');
    figure('from').textContent = `${span(ahead / 2)} ago`;
    figure('to').textContent = `in ${span(ahead)}`;
    draw(section, state, past, sampled(state, now, now + ahead), from, now + ahead);
  });
}

/** Returns what a bucket holds from one instant to another if nobody takes anything. */
function sampled(state, from, to) {
  return Array.from({ length: STEPS + 1 }, (_, i) => {
    const at = Math.floor(from + ((to - from) * i) / STEPS);
    return [at, evaluate(state, at, 0).tokens];
  });
}

function draw(section, state, past, future, from, to) {
  const high = Math.max(state.capacity, 1e-9);
  const low = Math.min(0, ...past.map(([, tokens]) => tokens), future[0][1]);
  const x = (at) => ((at - from) / (to - from)) * WIDTH;
  const y = (tokens) => 10 + ((HEIGHT - 20) * (high - tokens)) / (high - low);
  const path = (points) => points.map(([at, tokens], i) => `${i ? 'L' : 'M'}${x(at).toFixed(2)} ${y(tokens).toFixed(2)}`).join('');
  const line = (name, attributes) => {
    const element = section.querySelector(`.curve .${name}`);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  };
  line('past', { d: path(past) });
  line('future', { d: path(future) });
  line('area', { d: `M${x(past[0][0])} ${y(0)}${path([...past, ...future]).replace('M', 'L')}L${WIDTH} ${y(0)}Z` });
  line('full', { y1: y(state.capacity), y2: y(state.capacity) });
  line('zero', { y1: y(0), y2: y(0) });
  line('now', { x1: x(future[0][0]), x2: x(future[0][0]) });
}

function number(n) {
  const size = Math.abs(n);
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3;
  return new Intl.NumberFormat('en', { maximumFractionDigits: digits, signDisplay: 'negative' }).format(n).replace('-', '−');
}

/** Returns microseconds in the two largest units that say enough. */
function span(us) {
  const s = us / 1e6;
  if (s < 1) return `${Math.ceil(us / 1e3)} ms`;
  if (s < 10) return `${Math.ceil(s * 10) / 10} s`;
  if (s < 60) return `${Math.ceil(s)} s`;
  if (s < 3600) return two(s, 60, 'min', 1, 's');
  if (s < 86_400) return two(s, 3600, 'h', 60, 'min');
  return two(s, 86_400, 'd', 3600, 'h');
}

function two(s, large, largeName, small, smallName) {
  const rounded = Math.round(s / small) * small;
  const rest = (rounded % large) / small;
  return `${Math.floor(rounded / large)} ${largeName}${rest ? ` ${rest} ${smallName}` : ''}`;
}
