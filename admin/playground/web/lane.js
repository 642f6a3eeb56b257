// A lane of the page: a bucket, its strip, what it would say now, and its figures.
import { createBucket } from './bucket.js';
import { html, set, write } from './draw.js';
import { count, number, owed, period, share, time, tokens, wait, worded } from './format.js';
import { look } from './simulate.js';
import { createStrip, deepestOf } from './strip.js';

const TITLES = { token: 'Token bucket', window: 'Fixed window', leaky: 'Leaky bucket', sliding: 'Sliding window', slots: 'Concurrency' };

const FREE = { leaky: 'room for ', slots: 'free: ' };

/** Returns what a limit is, in words. */
function policyOf({ id, start, queues, maxReserved }, settings) {
  if (id === 'slots') return `${number(start.capacity)} at a time, for ${number(settings.hold)} s each`;
  if (id === 'sliding') return `never more than ${worded(start.rate)} in any ${number(start.period_us / 1e6)} s`;
  const each = `${worded(start.rate)} ${period(settings.period)}`;
  if (id === 'window') return `${each}, all at once`;
  if (id === 'leaky') return `${each}, ${queues ? `a queue of ${maxReserved < Infinity ? number(maxReserved) : 'any length'}` : 'room for one request'}`;
  return start.capacity > 0 ? `${each}, at most ${number(start.capacity)} kept` : `${each}, none kept`;
}

/** Returns what was said to a request, or would be, in words. */
function answerOf({ ok, never, retryAfterUs, readyAtUs }, at, asWait) {
  if (never) return 'refused, it costs more than the limit can ever give';
  if (!ok) return `refused, come back in ${wait(retryAfterUs)}`;
  if (readyAtUs <= at) return 'admitted';
  return asWait ? `reserved, runs in ${wait(readyAtUs - at)}` : `reserved, runs at ${time(readyAtUs)}`;
}

/** Returns what was said to the last request, as a sentence. */
function lastOf(e) {
  if (!e) return 'Nothing asked yet';
  const [verb, ...rest] = answerOf(e, e.at, false).split(', ');
  const text = `${verb} at ${time(e.at)}`;
  return [text[0].toUpperCase() + text.slice(1), ...rest].join(', ');
}

/** Returns a lane of the page. load(lane, history) gives it a history, and show(at) an instant of it. */
export function createLane(id) {
  const bucket = createBucket(id), strip = createStrip();
  const level = html('p', { class: 'level' }), policy = html('p', { class: 'policy' });
  const now = html('p', { class: 'now' }), last = html('p', { class: 'last' });
  const rows = {};
  const figures = html('dl', { class: 'figures' });
  for (const name of ['admitted', 'refused', 'waiting', 'first', 'refusal', 'lately', 'busiest']) {
    rows[name] = { term: html('dt'), value: html('dd') };
    rows[name].element = html('div', { 'data-figure': name }, rows[name].term, ' ', rows[name].value);
    figures.append(rows[name].element);
  }
  const element = html('section', { class: 'lane', id: `lane-${id}`, 'aria-labelledby': `title-${id}` },
    html('div', { class: 'vessel' }, bucket.element, level),
    html('div', { class: 'told' }, html('h2', { id: `title-${id}` }, TITLES[id]), policy, now, last),
    strip.element, figures);
  let lane, history, deepest;

  function figure(name, term, value) {
    rows[name].element.hidden = value === null;
    write(rows[name].term, term);
    write(rows[name].value, value ?? '');
  }

  return {
    element,
    load(nextLane, nextHistory) {
      [lane, history] = [nextLane, nextHistory];
      deepest = deepestOf(lane);
      write(policy, policyOf(lane, history.settings));
      strip.draw(lane, history);
      const all = look(lane, history.span, history.settings);
      set(strip.element, {
        'aria-label': `${TITLES[id]} over ${time(history.span)}: ${count(all.admitted)} of ${count(all.asked)} requests admitted`,
      });
    },
    show(at) {
      const { settings } = history;
      const seen = look(lane, at, settings);
      const { capacity } = lane.start;
      const free = `${tokens(seen.tokens)} of ${number(capacity)}`;
      const held = seen.tokens < 0 ? `owes ${owed(-seen.tokens)}` : `${FREE[lane.id] ?? ''}${free}`;
      bucket.draw(seen.tokens, capacity, deepest);
      strip.show(at);
      set(bucket.element, { 'aria-label': `${TITLES[id]}: ${held} ${id === 'slots' ? 'slots' : 'tokens'}` });
      write(level, held);
      const answer = answerOf(seen.now, at, true);
      write(now, `A request now: ${answer}`);
      now.dataset.answer = !seen.now.ok ? 'refused' : seen.now.readyAtUs > at ? 'waits' : 'admitted';
      write(last, lastOf(seen.last));
      const each = `${number(settings.period)}\u00a0s`;
      figure('admitted', 'Admitted', count(seen.admitted));
      figure('refused', 'Refused', count(seen.refused));
      figure('waiting', 'Waiting', seen.admitted && lane.events.some((e) => e.readyAtUs > e.at) ? count(seen.waiting) : null);
      figure('first', `First ${each}`, share(seen.firstPeriod));
      figure('lately', `Last ${each}`, seen.lastPeriod && share(seen.lastPeriod));
      figure('refusal', 'First refusal', seen.firstRefusal === null ? 'none yet' : time(seen.firstRefusal));
      figure('busiest', `Busiest ${each}`, worded(seen.busiest));
    },
    /** What was said last, and what is held. */
    get summary() { return `${TITLES[id]}: ${last.textContent}, ${level.textContent}.`; },
  };
}
