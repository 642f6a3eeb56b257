// Simulated time: it runs, at any speed, stands still, and goes on by steps.

/** Simulated seconds in a second. */
export const SLOWEST = 0.1;
export const FASTEST = 60;

const LONGEST_MS = 1000; // that pass from one picture to the next: a page that nobody looks at gets none

/**
 * @param {object} options
 * @param {() => number} options.now milliseconds on a clock that nobody sets
 * @param {(run: () => void) => void} options.frame calls run when the next picture is due
 * @param {() => void} options.changed is called after each change
 */
export function createPlayer({ now, frame, changed }) {
  let at = 0, span = 0, instants = [], speed = 1, running = false, then = 0, turn = 0;

  function go(to, stop = true) {
    at = Math.min(Math.max(Math.round(to), 0), span);
    if (stop || at === span) running = false;
    changed();
  }

  function tick(mine) {
    if (!running || mine !== turn) return; // it was stopped, or started again, since this was asked for
    const ms = now() - then;
    then += ms;
    go(at + Math.min(ms, LONGEST_MS) * 1000 * speed, false);
    if (running) frame(() => tick(mine));
  }

  return {
    get at() { return at; },
    get running() { return running; },
    get speed() { return speed; },
    get ended() { return at === span; },
    /** Begins a history at an instant in microseconds. Time that runs is stopped, unless it goes on. */
    load(history, from, goesOn = false) {
      ({ span, instants } = history);
      go(from, !goesOn);
    },
    /** Runs, from the beginning if it is at the end, or stops. */
    toggle() {
      running = !running;
      if (running && at === span) at = 0;
      then = now();
      const mine = ++turn;
      changed();
      if (running) frame(() => tick(mine));
    },
    seek: (to) => go(to),
    /** Goes to the next instant at which something happens. */
    forward() { go(instants.find((t) => t > at) ?? span); },
    /** Goes back to the instant before at which something happened. */
    back() { go(instants.findLast((t) => t < at) ?? 0); },
    setSpeed(to) {
      speed = Math.min(Math.max(to, SLOWEST), FASTEST);
      changed();
    },
  };
}
