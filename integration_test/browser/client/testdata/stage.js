// A stage for the polling client: its clock, its timers, its server and its page stand still until they are told.

export const SERVER = 1_772_409_600_000_000; // the server's clock, in microseconds, when ours shows 0

// A message to oneself, since timers are not real here: all that was answered is dealt with before it arrives.
const { port1, port2 } = new MessageChannel();
const later = (run) => { port1.onmessage = run; port2.postMessage(null); };

export class Stage {
  ms = 1000; // what the client's clock shows
  ahead = 0; // microseconds by which the server's clock was set since
  polls = []; // those that were asked, in their order
  #timers = new Map();
  #last = 0;

  constructor() {
    const set = (repeat) => (run, delay) => {
      this.#timers.set(++this.#last, { run, at: this.ms + delay, every: repeat ? delay : 0 });
      return this.#last;
    };
    window.setTimeout = set(false);
    window.setInterval = set(true);
    window.clearTimeout = window.clearInterval = (id) => this.#timers.delete(id);
  }

  get server() { return SERVER + this.ahead + this.ms * 1000; }
  get timers() { return this.#timers.size; }
  now = () => this.ms;
  fetch = (url, init) => new Promise((resolve, reject) => {
    init.signal.addEventListener('abort', () => reject(init.signal.reason));
    this.polls.push({ url, init, at: this.ms, resolve, reject });
  });

  /** Lets time go by, and what is due in it run. */
  async pass(ms) {
    for (const end = this.ms + ms; ;) {
      const [id, due] = [...this.#timers].sort(([, a], [, b]) => a.at - b.at)[0] ?? [];
      if (!due || due.at > end) { this.ms = end; break; }
      this.ms = Math.max(this.ms, due.at);
      if (due.every) due.at += due.every;
      else this.#timers.delete(id);
      due.run();
      await this.settle();
    }
    await this.settle();
  }

  settle() { return new Promise((resolve) => later(resolve)); }

  /** Answers a poll, the latest when not said: with a bucket's value, or as given. */
  async answer({ value = 0, now_us = this.server, poll = this.polls.length - 1, status = 200, headers, body, fail } = {}) {
    const limits = [{ ...perSecond, value, ts_us: now_us, now_us }];
    if (fail) this.polls[poll].reject(new TypeError(fail));
    else this.polls[poll].resolve(response(status, headers, body ?? JSON.stringify({ limits })));
    await this.settle();
  }

  show(seen) {
    Object.defineProperty(document, 'hidden', { configurable: true, get: () => !seen });
    document.dispatchEvent(new Event('visibilitychange'));
    return this.settle();
  }
}

/** Has what the client uses of a Response, and is read at once. */
const response = (status, headers, body) => (
  { ok: status === 200, status, headers: new Headers(headers), json: async () => JSON.parse(body) });

/** A limit of 5 tokens, one a second. */
const perSecond = { limit: 'calls', kind: 'token bucket', rate: 1, period_us: 1e6, capacity: 5 };

export function equal(got, want, what = '') {
  const [g, w] = [got, want].map((v) => JSON.stringify(v));
  if (g !== w) throw new Error(`${what} is ${g}, not ${w}`);
}

export function within(got, low, high, what = '') {
  if (!(got >= low && got <= high)) throw new Error(`${what} is ${got}, not from ${low} to ${high}`);
}
