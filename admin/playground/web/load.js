// When requests come, and what they cost.

/** The most requests of one simulation. */
export const MOST = 2000;

/**
 * @typedef {object} Arrival
 * @property {number} at microseconds since the simulation began, whole
 * @property {number} cost
 * @property {'take'|'reserve'} verb
 */

/** Returns numbers from 0 up to 1 that are the same for the same seed (mulberry32). */
export function randomOf(seed) {
  let a = seed >>> 0;
  return () => {
    a = (a + 0x6d2b79f5) | 0;
    let t = Math.imul(a ^ (a >>> 15), a | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** The instants of each pattern, in seconds, without end. */
const PATTERNS = {
  * even({ load }) {
    for (let i = 0; ; i++) yield i / load;
  },
  * bursty({ load, burst }) { // ten times as fast as on the average, and then none
    for (let i = 0; ; i++) yield (Math.floor(i / burst) * burst + (i % burst) / 10) / load;
  },
  * poisson({ load, seed }) {
    const random = randomOf(seed);
    for (let at = 0; ; yield at) at -= Math.log(1 - random()) / load;
  },
};

/** Returns the requests of a simulation in their order. script(settings) is the preset's own load, if it has one. */
export function arrivalsOf(settings, script) {
  const { pattern, cost, verb, span } = settings;
  const arrivals = [];
  const add = (seconds, times = 1, own = verb) => {
    const at = Math.round(seconds * 1e6);
    const more = at < span * 1e6 && arrivals.length < MOST;
    if (more) arrivals.push({ at, cost: cost * times, verb: own });
    return more;
  };
  if (pattern === 'preset') {
    for (const { at, times, verb: own } of script(settings)) {
      if (!add(at, times, own)) break;
    }
    return arrivals;
  }
  for (const at of PATTERNS[pattern](settings)) {
    if (!add(at)) return arrivals;
  }
  return arrivals;
}
