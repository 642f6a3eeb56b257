// A simulation: the same requests put to three limits side by side. Every decision is one of ratelimit.js.
import { evaluate, reserve, take } from './ratelimit.js';
import { arrivalsOf } from './load.js';

/**
 * @typedef {object} Event what a limit said to a request
 * @property {number} at microseconds since the simulation began
 * @property {number} cost
 * @property {'take'|'reserve'} verb
 * @property {boolean} ok
 * @property {boolean} never whether no wait would help
 * @property {number} tokens what is held afterwards
 * @property {number} retryAfterUs 0 when ok, null when never
 * @property {number|null} readyAtUs when the work runs, null when refused
 * @property {import('./ratelimit.js').State} state afterwards
 * @property {number} admitted how many were admitted so far, with this one
 *
 * @typedef {object} Lane a limit and what it said
 * @property {string} id
 * @property {import('./ratelimit.js').State} start what it held at first
 * @property {number} maxReserved
 * @property {boolean} queues whether it reserves whatever a request asks
 * @property {boolean} [takesOnly] whether it has no reservations, and takes
 * @property {Event[]} events
 * @property {{at: number, most: number}[]} runs when work began, and the most tokens any period up to then has seen
 */

function full(limit, kind, { rate, period }, capacity) {
  return { limit, kind, rate, period_us: Math.round(period * 1e6), capacity, value: capacity, ts_us: 0, now_us: 0 };
}

/** A sliding window. Its period is cut to a whole number of microseconds for each slice. */
function slides(settings) {
  const { rate, period, slices } = settings;
  const slice = Math.max(Math.floor((period * 1e6) / slices), 1);
  return { ...full('sliding', 'sliding window', settings, rate), period_us: slice * slices, slices, totals: [0, 0] };
}

/** Slots that the work holds for as long as it takes. */
const slots = ({ most, hold }) => ({
  limit: 'slots', kind: 'concurrency', capacity: most, lease_us: Math.round(hold * 1e6), ends_us: [], ts_us: 0, now_us: 0,
});

/**
 * Returns the three limits, full. A leaky bucket has room for one request, the largest that comes. Its queue is as long as the
 * capacity, and where that is 0 as what may be owed.
 */
function lanesOf(settings, arrivals) {
  const { capacity, rate, leaky, maxReserved } = settings;
  const one = arrivals.reduce((most, { cost }) => Math.max(most, cost), 0) || settings.cost;
  const owed = maxReserved ?? Infinity;
  const queues = leaky === 'queue';
  const third = {
    leaky: () => ({ id: 'leaky', start: full('leaky', 'token bucket', settings, one), maxReserved: queues ? capacity || owed : owed, queues }),
    sliding: () => ({ id: 'sliding', start: slides(settings), takesOnly: true }),
    slots: () => ({ id: 'slots', start: slots(settings), takesOnly: true }),
  }[settings.third]();
  return [
    { id: 'token', start: full('token', 'token bucket', settings, capacity), maxReserved: owed, queues: false },
    { id: 'window', start: full('window', 'fixed window', settings, rate), maxReserved: owed, queues: false },
    third,
  ];
}

/** What a lane does of what is asked: one that queues reserves, and one that has no reservations takes. */
const verbOf = (lane, verb) => (lane.queues ? 'reserve' : lane.takesOnly ? 'take' : verb);

/** Slots are whole. */
const costOf = ({ start }, cost) => (start.kind === 'concurrency' ? Math.ceil(cost) : cost);

/** Returns the state and the answer after a request. The answer to what can never be given has never. */
function step(lane, state, { at, cost, verb }) {
  try {
    if (verbOf(lane, verb) === 'reserve') return reserve(state, at, cost, lane.maxReserved);
    const { state: next, answer } = take(state, at, cost);
    return { state: next, answer: { ...answer, readyAtUs: answer.ok ? at : null } };
  } catch (e) {
    if (!(e instanceof RangeError)) throw e;
    const answer = { ...evaluate(state, at, 0), ok: false, never: true, retryAfterUs: null, readyAtUs: null };
    return { state: { ...state, now_us: at }, answer };
  }
}

/** Returns the lane with what it said to the requests. */
export function run(lane, arrivals, period) {
  let state = lane.start, admitted = 0;
  const events = arrivals.map((asked) => {
    const arrival = { ...asked, cost: costOf(lane, asked.cost) };
    const { state: next, answer } = step(lane, state, arrival);
    state = next;
    if (answer.ok) admitted++;
    const { ok, never = false, tokens, retryAfterUs, readyAtUs } = answer;
    return { ...arrival, verb: verbOf(lane, arrival.verb), ok, never, tokens, retryAfterUs, readyAtUs, state, admitted };
  });
  return { ...lane, events, runs: runsOf(events, period) };
}

/** Work runs in the order it was admitted in. */
function runsOf(events, period) {
  const runs = [];
  let first = 0, inPeriod = 0, most = 0;
  for (const { readyAtUs: at, cost } of events.filter((e) => e.ok)) {
    for (inPeriod += cost; first < runs.length && runs[first].at <= at - period; first++) inPeriod -= runs[first].cost;
    most = Math.max(most, inPeriod);
    runs.push({ at, cost, most });
  }
  return runs;
}

/** Returns the whole history of a simulation. */
export function simulate(settings, script) {
  const arrivals = arrivalsOf(settings, script);
  const lanes = lanesOf(settings, arrivals).map((lane) => run(lane, arrivals, Math.round(settings.period * 1e6)));
  const span = Math.round(settings.span * 1e6);
  const happens = [...arrivals, ...lanes.flatMap((lane) => lane.runs)].map(({ at }) => at);
  const instants = new Set([0, ...happens.filter((at) => at < span), span]);
  return { settings, span, arrivals, lanes, instants: [...instants].sort((a, b) => a - b) };
}

/** Returns how many of a list, which is sorted by their instants, are not after at. */
function countUpTo(list, at) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle].at <= at) low = middle + 1;
    else high = middle;
  }
  return low;
}

const stateAt = (lane, n) => (n > 0 ? lane.events[n - 1].state : lane.start);

/**
 * Returns what a lane holds over time, as points of an instant and tokens: so many at equal distances, and two at each
 * request, before and after it.
 */
export function levels(lane, span, columns) {
  const points = [];
  let n = 0;
  const held = (at) => points.push([at, evaluate(stateAt(lane, n), at, 0).tokens]);
  for (let i = 0; i <= columns; i++) {
    const at = Math.round((i / columns) * (span - 1)); // the instant after the last may be another window's
    for (; n < lane.events.length && lane.events[n].at <= at; n++) {
      const { at: asked, tokens } = lane.events[n];
      held(asked);
      points.push([asked, tokens]);
    }
    held(at);
  }
  return points;
}

/** Returns what a lane shows at an instant. Nothing later is in it. */
export function look(lane, at, { cost, verb, period: seconds }) {
  const admittedUpTo = (instant) => {
    const n = countUpTo(lane.events, instant);
    return { asked: n, admitted: n > 0 ? lane.events[n - 1].admitted : 0 };
  };
  const { asked, admitted } = admittedUpTo(at);
  const state = stateAt(lane, asked), begun = countUpTo(lane.runs, at);
  const period = Math.round(seconds * 1e6);
  const before = admittedUpTo(at - period - 1), until = admittedUpTo(at - 1);
  const refused = lane.events.findIndex((e) => !e.ok);
  return {
    tokens: evaluate(state, at, 0).tokens,
    now: step(lane, state, { at, cost: costOf(lane, cost), verb }).answer,
    last: lane.events[asked - 1] ?? null,
    asked, admitted, refused: asked - admitted, waiting: admitted - begun,
    firstPeriod: admittedUpTo(Math.min(at, period - 1)),
    lastPeriod: at >= period ? { asked: until.asked - before.asked, admitted: until.admitted - before.admitted } : null,
    firstRefusal: refused >= 0 && refused < asked ? lane.events[refused].at : null,
    busiest: begun > 0 ? lane.runs[begun - 1].most : 0,
  };
}
