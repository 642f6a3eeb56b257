// The settings of a simulation: what each may be, and how a link carries them.

/** The numbers, in the order in which the page shows them. Periods and spans are in seconds. */
export const NUMBERS = {
  rate: { label: 'Rate', unit: 'tokens a period', min: 0.1, max: 100_000 },
  period: { label: 'Period', unit: 'seconds', min: 0.1, max: 3600 },
  capacity: { label: 'Capacity', unit: 'tokens', min: 0, max: 100_000 },
  cost: { label: 'Cost', unit: 'tokens a request', min: 0.01, max: 10_000 },
  maxReserved: { label: 'May owe', unit: 'tokens, empty: no bound', min: 0, max: 1_000_000, optional: true },
  slices: { label: 'Slices', unit: 'of a period', min: 1, max: 120, whole: true },
  most: { label: 'Slots', unit: 'at the same time', min: 1, max: 1000, whole: true },
  hold: { label: 'Work takes', unit: 'seconds', min: 0.1, max: 3600 },
  load: { label: 'Load', unit: 'requests a second', min: 0.01, max: 1000 },
  burst: { label: 'Burst', unit: 'requests at a time', min: 1, max: 500, whole: true },
  seed: { label: 'Seed', unit: 'of what is random', min: 0, max: 999_999, whole: true },
  span: { label: 'Time shown', unit: 'seconds', min: 1, max: 3600 },
};

/** The choices: their values, the usual one first, and what the page calls them. */
export const CHOICES = {
  verb: { label: 'Requests', of: { take: 'take, or are refused', reserve: 'reserve, and run later' } },
  pattern: { label: 'Load is', of: { preset: 'as in the example', even: 'even', bursty: 'bursty', poisson: 'random (Poisson)' } },
  third: { label: 'The third limit is', of: { leaky: 'a leaky bucket', sliding: 'a sliding window', slots: 'concurrency' } },
  leaky: { label: 'Leaky bucket', of: { meter: 'refuses (meter)', queue: 'lets wait (queue)' } },
};

/** What a preset does not say. maxReserved is null where nothing bounds it. */
export const DEFAULTS = {
  rate: 10, period: 1, capacity: 10, cost: 1, maxReserved: null, slices: 60, most: 3, hold: 2, load: 10, burst: 10, seed: 1, span: 10,
  verb: 'take', pattern: 'even', third: 'leaky', leaky: 'meter',
};

const LONGEST_LINK = 1000;

/** Returns what is wrong with a value of a setting, or ''. */
export function problem(name, value) {
  if (CHOICES[name]) return Object.hasOwn(CHOICES[name].of, value) ? '' : `${name} is one of ${Object.keys(CHOICES[name].of).join(', ')}`;
  const { min, max, whole, optional } = NUMBERS[name];
  if (value === null && optional) return '';
  const fits = typeof value === 'number' && value >= min && value <= max && (!whole || Number.isInteger(value));
  return fits ? '' : `${name} is ${whole ? 'a whole number' : 'a number'} from ${min} to ${max}${whole ? '' : ', with at most six decimals and no exponent'}`;
}

/** Returns the number that a text is, NaN for what is none: no signs, exponents or blanks. */
export const numberOf = (text) => (/^(\d{1,9}(\.\d{0,6})?|\.\d{1,6})$/.test(text) ? Number(text) : NaN);

/** Returns the fragment of a link to a preset with these settings, at an instant in microseconds. */
export function toFragment(preset, settings, at) {
  const link = new URLSearchParams({ preset: preset.id });
  for (const name of Object.keys(DEFAULTS)) {
    if (settings[name] !== preset.settings[name]) link.set(name, settings[name] ?? 'none');
  }
  if (at > 0) link.set('at', String(at / 1e6));
  return `#${link}`;
}

/**
 * Returns what the fragment of a link says, among these presets. A link that says anything wrong is refused as a whole:
 * error then says what is wrong, and preset is the first.
 * @returns {{preset: object, settings: object, at: number, error: string}}
 */
export function fromFragment(fragment, presets) {
  const refused = (error) => ({ preset: presets[0], settings: presets[0].settings, at: 0, error });
  const text = fragment.replace(/^#/, '');
  if (text.length > LONGEST_LINK) return refused(`it is longer than ${LONGEST_LINK} characters`);
  const link = [...new URLSearchParams(text)];
  const said = Object.fromEntries(link);
  if (link.length > Object.keys(said).length) return refused('it says something twice');
  const { preset: id = presets[0].id, at = '0', ...changes } = said;
  const preset = presets.find((p) => p.id === id);
  if (!preset) return refused('it names a preset that there is not');
  const settings = { ...preset.settings };
  for (const [name, value] of Object.entries(changes)) {
    if (!Object.hasOwn(DEFAULTS, name)) return refused('it has a setting that there is not');
    if (NUMBERS[name]) settings[name] = NUMBERS[name].optional && value === 'none' ? null : numberOf(value);
    else settings[name] = value;
    const wrong = problem(name, settings[name]);
    if (wrong) return refused(wrong);
  }
  if (!preset.script && settings.pattern === 'preset') return refused('its preset has no load of its own');
  const seconds = numberOf(at);
  if (!(seconds <= settings.span)) return refused(`at is a number of seconds from 0 to ${settings.span}`);
  return { preset, settings, at: Math.round(seconds * 1e6), error: '' };
}
