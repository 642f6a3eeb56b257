// What a rate limit of pgratelimit would answer, computed in the browser between two polls. It is for showing
// what is left and when to come back; the server decides.
//
// Spans and instants are whole microseconds, instants since 1970 by the server's clock. Every answer is that of
// the Go package ratelimit to the last bit, until 2255, when a number no longer holds a microsecond.

/**
 * @typedef {object} State a bucket, as MarshalJSON of the Go type Value writes it
 * @property {string} limit the limit's name
 * @property {'token bucket'|'fixed window'|'calendar window'|'sliding window'|'concurrency'} kind
 * @property {number} [rate] tokens that arrive each period; of a sliding window the most in any period
 * @property {number} [period_us]
 * @property {number} capacity the most tokens, or slots, that it holds
 * @property {number} [start_us] a window, or a slice of one that slides, begins there; absent is 0
 * @property {{period_us: number, start_us?: number, until_us?: number}[]} [windows] how long windows are, up to when (calendar window)
 * @property {number} [slices] of a period of a sliding window
 * @property {number[]} [totals] what was ever taken, up to ts_us and up to the ends of the slices before it, the newest first (sliding window)
 * @property {number} [lease_us] how long a slot is held (concurrency)
 * @property {number[]} [ends_us] when the lease ends of each slot that is held, in order (concurrency)
 * @property {number} [value] tokens held at ts_us
 * @property {number} ts_us
 * @property {number} now_us when the server read it
 *
 * @typedef {object} Answer
 * @property {boolean} ok whether the cost could be taken
 * @property {number} tokens what the bucket holds: below 0 while reservations are owed
 * @property {number} remaining the same, never below 0
 * @property {number} retryAfterUs the wait until the cost could be taken if nobody takes anything; 0 when ok
 * @property {number} resetAfterUs the wait until the bucket is full if nobody takes anything
 */

const HORIZON = 250 * 365 * 86_400e6; // the longest wait that is told
const CLOCK_TOLERANCE = 60e6; // how far ts may be ahead before it is taken for the mark of a wrong clock
const MAX_TOKENS = 1e12; // what may be owed where a policy sets no bound, and what arrives in 100 years:
const MAX_SPAN_NS = 36_525 * 86_400e9;
const LONGEST_LEASE = 86_400e6;
const MOST_TOTALS = 64; // times the capacity: larger totals of a sliding window are made small
const UNRESERVED = ['sliding window', 'concurrency'];

/**
 * Returns what a state means for a cost at an instant of the server's clock. It throws a RangeError for a cost
 * that is no number of tokens, or is more than the limit can ever hold, so that no wait would help.
 * @param {State} state
 * @param {number} [at] defaults to when the server read the state
 * @param {number} [cost]
 * @returns {Answer}
 */
export function evaluate(state, at = state.now_us, cost = 1) {
  const { tokens, wait } = read(state, at, cost, 0);
  const retryAfterUs = wait(cost, 0);
  return { ok: retryAfterUs === 0, tokens, remaining: Math.max(tokens, 0), retryAfterUs, resetAfterUs: wait(state.capacity, 0) };
}

/**
 * Returns what the state would be, and the answer to it, if the cost were taken at an instant of the server's clock:
 * for a preview or a playground, as Value.Take of the Go package. The server is not asked and knows nothing of it. A
 * refusal leaves the tokens as they are. It throws as evaluate does.
 * @param {State} state
 * @param {number} [at] defaults to when the server read the state
 * @param {number} [cost]
 * @returns {{state: State, answer: Answer}}
 */
export function take(state, at = state.now_us, cost = 1) {
  const { state: next, answer } = step(state, at, cost, 0);
  return { state: next, answer };
}

/**
 * Returns what the state would be, and the answer to it, if the cost were reserved at an instant of the server's clock:
 * taken even where it is not there yet, as Value.Reserve of the Go package. The answer says besides from which instant
 * the work may run, null when it was refused. It throws as evaluate does, for what the limit can never give and owe.
 * @param {State} state
 * @param {number} [at] defaults to when the server read the state
 * @param {number} [cost]
 * @param {number} [maxReserved] how many tokens may be owed: MaxReserved of the policy, 0 for its None
 * @returns {{state: State, answer: Answer & {readyAtUs: number|null}}}
 */
export function reserve(state, at = state.now_us, cost = 1, maxReserved = Infinity) {
  if (UNRESERVED.includes(state.kind)) throw new RangeError(`${state.limit} takes no reservations`);
  if (!(maxReserved >= 0)) throw new RangeError(`${maxReserved} is no number of tokens that ${state.limit} may owe`);
  const most = state.kind === 'calendar window' ? state.rate : state.rate * (MAX_SPAN_NS / (state.period_us * 1000));
  const maxOwed = Math.min(maxReserved, MAX_TOKENS, most);
  const { state: next, answer, readyAtUs } = step(state, at, cost, maxOwed);
  return { state: next, answer: { ...answer, readyAtUs } };
}

// The step of the algebra: the cost is taken when the bucket then owes no more than maxOwed.
function step(state, at, cost, maxOwed) {
  const { now, fixed, taken, wait } = read(state, at, cost, maxOwed);
  const retryAfterUs = wait(cost, -maxOwed), ok = retryAfterUs === 0;
  const next = { ...state, ...fixed, now_us: now, ...(ok && cost > 0 && taken(cost)) };
  const after = evaluate(next, now, 0); // which waits until nothing is owed
  return { state: next, answer: { ...after, ok, retryAfterUs }, readyAtUs: ok ? now + after.retryAfterUs : null };
}

/**
 * What each kind of limit makes of a state at an instant: the tokens; wait(needed, lowest), until so many can be taken and
 * that many remain; what of the state a wrong clock had changed, put right; and what changes when a cost is taken.
 */
const KINDS = {
  'token bucket': (state, now) => steps(state, now, 1, state.period_us),
  'fixed window': (state, now) => steps(state, now, state.period_us, 1),
  'calendar window': calendar,
  'sliding window': slides,
  concurrency: slots,
};

function read(state, at, cost, maxOwed) {
  const { kind, capacity } = state;
  const now = Math.floor(at);
  if (!Object.hasOwn(KINDS, kind)) {
    throw new TypeError(`${state.limit} has kind ${kind}; reload the page, the server has a newer module`);
  }
  if (!Number.isSafeInteger(now)) throw new RangeError(`${at} is no instant in microseconds`);
  if (!(cost >= 0) || (cost > 0 && cost < Math.max(capacity * 2 ** -40, 1e-9))) {
    throw new RangeError(`a cost of ${cost} of ${state.limit} is no number of tokens from 0 up, or too small`);
  }
  if (cost > capacity + maxOwed || capacity - cost < -maxOwed) { // the sum may have been rounded up
    throw new RangeError(`${state.limit} can never give ${cost}, only ${capacity + maxOwed} at once`);
  }
  if (kind === 'concurrency' && !Number.isInteger(cost)) throw new RangeError(`${cost} of ${state.limit}: slots are whole`);
  return { now, ...KINDS[kind](state, now) };
}

// Tokens arrive in steps: a fixed window's is its period, a token bucket's is a microsecond. No integer below
// passes 2^53, and % is exact, so nothing rounds that does not round in Go.
function steps(state, now, step, perPeriod) {
  const { rate, capacity, start_us: start = 0, value } = state;
  const beginOf = (t) => t - ((((t - start) % step) + step) % step);
  const begin = beginOf(now);
  const ts = state.ts_us > now + CLOCK_TOLERANCE ? begin : state.ts_us;
  const gap = Math.max(begin - ts, 0);
  const elapsed = (gap - (gap % step)) / step + (gap % step > 0 ? 1 : 0);
  const tokensAfter = (more) => Math.min(capacity, value + ((elapsed + more) * rate) / perPeriod);
  const tokens = tokensAfter(0);

  const wait = (needed, lowest) => {
    const enough = (more) => tokensAfter(more) - needed >= lowest;
    if (enough(0)) return 0;
    let low = 0; // not enough
    let high = Math.floor(HORIZON / step) + 2; // enough, or past the horizon
    while (low + 1 < high) {
      const middle = low + Math.floor((high - low) / 2);
      if (enough(middle)) high = middle;
      else low = middle;
    }
    return Math.min(beginOf(Math.max(ts, now)) - now + high * step, HORIZON);
  };
  return { tokens, wait, fixed: { ts_us: ts }, taken: (cost) => ({ value: tokens - cost, ts_us: Math.max(ts, begin) }) };
}

// The windows of a calendar are runs of windows of one length, each of them a fixed window.
function calendar(state, now) {
  let { value, ts_us: ts, windows: runs } = state;
  const inRun = ({ period_us: period, start_us: start }, tokens, since, at) => steps({ ...state, value: tokens, ts_us: since, start_us: start }, at, period, 1);
  for (; runs[0].until_us <= now; runs = runs.slice(1)) {
    const next = runs[0].until_us;
    if (ts < next) [value, ts] = [inRun(runs[0], value, ts, next).tokens, next];
  }
  const { tokens, taken } = inRun(runs[0], value, ts, now);
  const wait = (needed, lowest) => {
    for (let i = 0, at = now, held = value, since = ts; ; i++) {
      const { until_us: until = Infinity } = runs[i], run = inRun(runs[i], held, since, at), more = run.wait(needed, lowest);
      if (at + more <= until) return Math.min(at - now + more, HORIZON);
      if (since < until) [held, since] = [inRun(runs[i], held, since, until).tokens, until];
      at = until;
    }
  };
  return { tokens, wait, taken, fixed: { ...taken(0), windows: runs } }; // a state has no window before its own
}

// What was taken counts until all of its slice is a period ago: what counts is the difference of two totals. They are added
// up as Go adds them up.
function slides(state, now) {
  const { capacity, slices, start_us: start = 0 } = state;
  const step = state.period_us / slices;
  const beginOf = (t) => t - ((((t - start) % step) + step) % step);
  const begin = beginOf(now);
  const ts = state.ts_us > now + CLOCK_TOLERANCE ? begin : state.ts_us;
  const latest = Math.max(ts, begin), passed = Math.max((begin - beginOf(ts)) / step, 0);
  const baseOf = (totals, later = 0) => totals[Math.min(slices + 1 - later, totals.length - 1)]; // in so many slices from now
  const read = state.totals.slice(0, slices + 2);
  const by = read[0] > MOST_TOTALS * capacity ? baseOf(read) + read[0] - read[0] : 0;
  const kept = read.map((total) => total - by);
  const totals = passed > slices ? [0, 0] : [...Array(passed).fill(kept[0]), ...kept].slice(0, slices + 2);
  const left = (cost, later = 0) => capacity - (totals[0] + cost - baseOf(totals, later));
  const wait = (needed, lowest) => {
    if (!(capacity - needed >= lowest)) return HORIZON;
    let later = 0;
    while (later <= slices && !(left(needed, later) >= lowest)) later++;
    const forgotten = beginOf(ts) + (slices + 1) * step; // all that was taken, also where the sum is rounded up
    return later && Math.min(beginOf(latest) + later * step - now, forgotten - now, HORIZON);
  };
  const taken = (cost) => ({ value: left(cost), ts_us: latest, totals: [totals[0] + cost, ...totals.slice(1)] });
  return { tokens: left(0), wait, fixed: { ts_us: ts }, taken };
}

// Slots are free again when leases end.
function slots(state, now) {
  const { capacity, lease_us: lease } = state;
  const held = state.ends_us.filter((end) => end > now);
  const fixed = {};
  if (state.ts_us > now + CLOCK_TOLERANCE) { // a wrong clock gave some of them
    const ahead = state.ts_us - now;
    held.forEach((end, i) => {
      if (end > now + lease + CLOCK_TOLERANCE) held[i] = Math.min(Math.max(end - ahead, now + lease), now + LONGEST_LEASE);
    });
    Object.assign(fixed, { ts_us: now, ends_us: held.sort(byNumber) });
  }
  const tokens = capacity - held.length;
  const wait = (needed, lowest) => {
    if (tokens - needed >= lowest) return 0;
    const end = [...held].sort(byNumber).find((_, i) => tokens + i + 1 - needed >= lowest);
    return end === undefined ? HORIZON : Math.min(end - now, HORIZON);
  };
  const taken = (cost) => ({
    ts_us: Math.max(fixed.ts_us ?? state.ts_us, now),
    ends_us: [...held, ...Array(cost).fill(now + lease)].sort(byNumber),
  });
  return { tokens, wait, fixed, taken };
}

const byNumber = (a, b) => a - b;

const LONGEST_BACKOFF = 300e3; // unless the server asks for more, or polls are further apart
const SAMPLES = 8; // of the server's clock

/**
 * Polls the server for the caller's own states and answers from them in between.
 * @param {object} options
 * @param {string} options.url where the server answers with {limits: State[]}, and names those it leaves out in left_out
 * @param {number} [options.pollMs] time between polls while the page is seen
 * @param {number} [options.tickMs] time between calls of the listeners while the page is seen
 * @param {number} [options.timeoutMs] how long an answer may take
 * @param {typeof fetch} [options.fetch]
 * @param {() => number} [options.now] milliseconds on a clock that nobody sets, from any origin
 */
export function createClient({
  url, pollMs = 15_000, tickMs = 250, timeoutMs = 10_000, fetch = globalThis.fetch, now = () => performance.now(),
}) {
  const life = new AbortController();
  const listeners = new Set();
  let states = new Map(); // by the limit's name
  let samples = [], offset = NaN; // of the server's clock less ours, in microseconds: between low and high
  let asked = 0, answered = 0; // polls are counted: an answer to one before the latest answered is no news
  let failures = 0, error = null, due = 0, timer, ticker; // due: when to poll next, on our clock
  const seen = () => !globalThis.document?.hidden;
  const serverNow = () => Math.floor(now() * 1000 + offset);

  // The server read its clock between sent and received: it is taken for the middle of the shortest of the last
  // round trips, which is right to half of that trip. Samples that the newest contradicts are from before one
  // of the clocks was set, or this machine slept.
  function learn(serverUs, sent, received) {
    const newest = { low: serverUs - received * 1000, high: serverUs - sent * 1000 };
    samples = samples.filter((s) => s.low <= newest.high && s.high >= newest.low).slice(1 - SAMPLES);
    samples.push(newest);
    const best = samples.reduce((a, b) => (b.high - b.low < a.high - a.low ? b : a));
    offset = (best.low + best.high) / 2;
  }

  function notify() {
    for (const listener of [...listeners]) {
      try { listener(); } catch (e) { reportError(e); } // and the others are told all the same
    }
  }

  /** Asks at once, as after something was taken. It resolves when answered, also when that fails: see error. */
  async function refresh() {
    if (life.signal.aborted) return;
    const turn = ++asked, sent = now();
    due = sent + timeoutMs; // until it is answered
    const late = () => life.signal.aborted || turn < answered;
    let failure = null, retryAfterMs = 0;
    try {
      const response = await fetch(url, {
        cache: 'no-store', headers: { Accept: 'application/json' },
        signal: AbortSignal.any([life.signal, AbortSignal.timeout(timeoutMs)]),
      });
      const received = now();
      if (!response.ok) {
        retryAfterMs = Number(response.headers.get('Retry-After')) * 1000 || 0; // a date is left to the back-off
        throw Object.assign(new Error(`${url} answered ${response.status}`), { status: response.status });
      }
      const { limits, left_out: leftOut } = await response.json();
      const next = new Map(limits.map((s) => [s.limit, s]));
      limits.forEach((s) => evaluate(s, s.now_us, 0)); // throws when they are not what they should be
      if (late()) return;
      if (limits.length > 0 || !leftOut) learn(limits[0].now_us, sent, received);
      states = next;
    } catch (e) {
      failure = e;
    }
    if (late()) return;
    if (failure?.status === 401 || failure?.status === 403) states = new Map(); // nobody's, or somebody else's
    answered = turn;
    error = failure;
    failures = failure ? failures + 1 : 0;
    const backoff = Math.min(pollMs * 2 ** failures, Math.max(pollMs, LONGEST_BACKOFF));
    const pause = failure ? Math.max(backoff, retryAfterMs) : pollMs;
    due = now() + Math.min(pause * (1 + Math.random() / 4), 86_400e3); // not all pages at once
    schedule();
    notify();
  }

  function schedule() {
    clearTimeout(timer);
    if (seen()) timer = setTimeout(refresh, Math.max(due - now(), 0));
  }

  function pace() {
    clearInterval(ticker);
    if (listeners.size > 0 && seen() && !life.signal.aborted) ticker = setInterval(notify, tickMs);
  }

  function look() {
    pace();
    if (seen() && failures === 0) refresh();
    else schedule(); // a page that is looked at again and again does not wear out a server in trouble
  }

  globalThis.document?.addEventListener('visibilitychange', look, { signal: life.signal });
  if (seen()) refresh();
  return {
    /** What the limit would answer now, or null while nothing is known of it. It throws as evaluate does.
     * @param {string} limit @param {number} [cost] @returns {Answer|null} */
    check: (limit, cost = 1) => (states.has(limit) ? evaluate(states.get(limit), serverNow(), cost) : null),
    /** Calls listener after each poll and, for a page that shows tokens arriving, every tickMs.
     * @param {() => void} listener @returns {() => void} what ends it */
    subscribe(listener) {
      listeners.add(listener);
      pace();
      return () => { listeners.delete(listener); pace(); };
    },
    refresh,
    /** The server's clock in microseconds since 1970, NaN before the first answer. */
    serverNow,
    /** The state last read of the limit, or undefined. @param {string} limit @returns {State|undefined} */
    state: (limit) => states.get(limit),
    /** Why the last poll failed, or null. Its status, when there is one, is that of the HTTP answer. */
    get error() { return error; },
    /** Ends polling and the calls of listeners. */
    close() {
      life.abort();
      clearTimeout(timer);
      clearInterval(ticker);
      listeners.clear();
    },
  };
}
