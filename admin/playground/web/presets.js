// The presets: well-known examples of rate limits, each with a story and the figures of it that the page shows.
import { DEFAULTS } from './settings.js';
import { randomOf } from './load.js';

/** Requests one after the other: each part begins at an instant and has so many, so many seconds apart. */
function* parts(...list) {
  for (const [begin, count, every, more] of list) {
    for (let i = 0; i < count; i++) yield { at: begin + i * every, ...more };
  }
}

/** The jobs of a model: as many a second as the load, on the average, of one to twelve times the cost each. */
function* jobs({ seed, load }) {
  const random = randomOf(seed);
  for (let at = 0; ;) {
    yield { at, times: Math.ceil(random() * random() * 12) };
    at -= Math.log(1 - random()) / load;
  }
}

/**
 * @typedef {object} Preset
 * @property {string} id as links name it
 * @property {string} title
 * @property {string} story two sentences
 * @property {object} settings
 * @property {number} speed simulated seconds in a second
 * @property {(settings: object) => Iterable<{at: number, times?: number, verb?: string}>} [script] its own load, in seconds
 * @property {string[]} [uses] the settings that the script makes matter
 * @property {[string, number, string, string][]} shows the lane, the instant in seconds, what the lane shows then, and how
 *   the story says it
 */

const preset = ({ settings, ...rest }) => ({ speed: 1, ...rest, settings: { ...DEFAULTS, ...(rest.script && { pattern: 'preset' }), ...settings } });

/** @type {Preset[]} */
export const PRESETS = [
  preset({
    id: 'sixty', title: '60 requests a second',
    story: 'A full bucket of 50 gains 10 tokens a second, and 60 requests come each second. 59 are admitted in the first second, '
      + 'the first refusal is at 0.983 s, and from then on one in six gets through.',
    settings: { rate: 10, capacity: 50, load: 60, span: 3 }, speed: 0.25,
    shows: [['token', 1, '59 of 60', '59 are admitted'], ['token', 1, '0.983 s', 'at 0.983 s'], ['token', 3, '1 in 6', 'one in six']],
  }),
  preset({
    id: 'meter', title: 'Parking meter',
    story: 'A meter holds ten quarters, and another falls in every six seconds. Ten cars park within a second, the eleventh is '
      + 'told to come back in 5 s, and from then on one car in three finds a quarter.',
    settings: { rate: 10, period: 60, capacity: 10, load: 0.5, span: 120 }, speed: 10,
    script: () => parts([0, 10, 0.1], [1, 1, 1], [2, 59, 2]),
    shows: [['token', 0.95, '0.15 of 10', 'Ten cars park'], ['token', 1, 'come back in 5 s', 'in 5 s'], ['token', 120, '1 in 3', 'one car in three']],
  }),
  preset({
    id: 'idle', title: 'Five idle seconds',
    story: 'Two seconds at 60 requests a second leave little in the bucket of 50, and then nobody asks for five seconds. The time '
      + 'has filled it, all 50 tokens, so 59 of the 60 requests of the next second are admitted.',
    settings: { rate: 10, capacity: 50, load: 60, span: 9 }, speed: 0.5, uses: ['load'],
    script: ({ load }) => parts([0, 2 * load, 1 / load], [7, 2 * load, 1 / load]),
    shows: [['token', 6.999, '50 of 50', 'all 50 tokens'], ['token', 8, '59 of 60', '59 of the 60']],
  }),
  preset({
    id: 'three', title: '3 tokens asked for 5',
    story: 'Three tokens are there when five are reserved: 2 are owed, and the work is told to run at 14 s, when they have '
      + 'arrived. Who asks for one at 8 s is refused and told to come back in 12 s, and is admitted then, at 20 s.',
    settings: { rate: 10, period: 60, capacity: 3, span: 24 }, speed: 2, uses: ['maxReserved'],
    script: () => parts([2, 1, 0, { times: 5, verb: 'reserve' }], [8, 3, 6]),
    shows: [['token', 2, 'owes 2', '2 are owed'], ['token', 2, 'runs at 14 s', 'run at 14 s'], ['token', 8, 'come back in 12 s', 'in 12 s'],
      ['token', 20, 'Admitted at 20 s', 'at 20 s']],
  }),
  preset({
    id: 'credit', title: 'Burst credit',
    story: 'The bucket holds what arrives in 300 s, one token a second, when a surge of five requests a second begins. All 374 '
      + 'requests before 74.8 s are admitted, and from then on one in five.',
    settings: { rate: 1, capacity: 300, load: 5, span: 120 }, speed: 10,
    shows: [['token', 74.799, 'Admitted 374', 'All 374'], ['token', 75, '74.8 s', 'before 74.8 s'], ['token', 120, '1 in 5', 'one in five']],
  }),
  preset({
    id: 'boundary', title: 'The window boundary',
    story: 'The limit is ten in ten seconds, and twenty requests come around 10 s, where a window ends and the next begins. The '
      + 'fixed window admits all 20 within two seconds, twice the limit, and the token bucket admits 11.',
    settings: { rate: 10, period: 10, capacity: 10, load: 10, span: 20 }, speed: 2,
    script: () => parts([9, 20, 0.1]),
    shows: [['window', 11, 'Admitted 20', 'all 20'], ['token', 11, 'Admitted 11', 'admits 11']],
  }),
  preset({
    id: 'sliding', title: 'Any ten seconds',
    story: 'Never more than ten in any ten seconds, wherever they begin: of the twenty requests around 10 s the sliding window admits 10, '
      + 'and the fixed window all 20. The eleventh is told to come back in 9.5 s, when the oldest half of a second is ten seconds ago, '
      + 'and is admitted then, at 19.5 s.',
    settings: { rate: 10, period: 10, capacity: 10, load: 10, span: 24, third: 'sliding', slices: 20 }, speed: 2,
    script: () => parts([9, 20, 0.1], [19.4, 6, 0.1]),
    shows: [['sliding', 11, 'Admitted 10', 'admits 10'], ['window', 11, 'Admitted 20', 'all 20'], ['sliding', 10, 'come back in 9.5 s', 'in 9.5 s'],
      ['sliding', 19.45, 'Refused at 19.4 s', 'admitted then'], ['sliding', 19.5, 'Admitted at 19.5 s', 'at 19.5 s'],
      ['sliding', 24, 'Busiest 10 s 10', 'Never more than ten']],
  }),
  preset({
    id: 'slow', title: 'Slow work',
    story: 'Three may work at a time, for two seconds each, and no rate says that. The fourth request, at 1.5 s, is refused and told to come '
      + 'back in 0.5 s, when the first is done, and of the 24 requests 18 are admitted.',
    settings: { rate: 2, capacity: 2, load: 2, span: 12, third: 'slots', most: 3, hold: 2 }, speed: 1,
    shows: [['slots', 1.5, 'Refused at 1.5 s', 'at 1.5 s'], ['slots', 1.5, 'come back in 0.5 s', 'in 0.5 s'], ['slots', 1.5, 'free: 0 of 3', 'Three may work'],
      ['slots', 2, 'Admitted at 2 s', 'when the first is done'], ['slots', 12, 'Admitted 18', '18 are admitted']],
  }),
  preset({
    id: 'spacing', title: 'Spacing',
    story: 'The capacity is 0, so nothing is in store and every request reserves its turn. Eight requests that come within a '
      + 'second run one a second, and the last of them, which came at 0.7 s, runs at 8 s.',
    settings: { rate: 1, capacity: 0, load: 1, span: 24, verb: 'reserve', leaky: 'queue' }, speed: 2,
    script: () => parts([0, 8, 0.1], [12, 6, 0.1]),
    shows: [['token', 0.7, 'Reserved at 0.7 s', 'at 0.7 s'], ['token', 0.7, 'runs at 8 s', 'runs at 8 s']],
  }),
  preset({
    id: 'half', title: 'Half and half',
    story: 'A third party allows 100 requests a minute and not one more, so rate and capacity are half of that, 50. However hard '
      + 'it is pressed, here with 5 requests a second, no minute sees more than 99.',
    settings: { rate: 50, period: 60, capacity: 50, load: 5, span: 150 }, speed: 15,
    shows: [['token', 150, 'Busiest 60 s 99', 'more than 99']],
  }),
  preset({
    id: 'model', title: 'A model with a queue',
    story: 'Jobs reserve the tokens that they are estimated to need of 40,000 a minute, and the first that has to wait is told '
      + 'to run at 10.5 s. Nobody is refused before 34.547 s, when more than 20,000 would be owed and the job is told to come back in 2.953 s.',
    settings: {
      rate: 40_000, period: 60, capacity: 10_000, cost: 500, maxReserved: 20_000, load: 0.6, seed: 4, span: 120, verb: 'reserve', leaky: 'queue',
    },
    speed: 10, uses: ['load', 'seed'],
    script: jobs,
    shows: [['token', 7, 'runs at 10.5 s', 'at 10.5 s'], ['token', 34.6, 'come back in 2.953 s', 'in 2.953 s'], ['token', 34.6, '34.547 s', 'before 34.547 s']],
  }),
];
