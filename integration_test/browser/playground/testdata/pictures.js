// Draws one picture of each kind of limit, with the code that draws the page and its style sheet, which is in style. It is
// the body of an async function, which returns the text of each file by its name.
const { createBucket } = await import('./bucket.js');
const { svg } = await import('./draw.js');
const { run } = await import('./simulate.js');
const { createStrip } = await import('./strip.js');

const WIDTH = 720, HEIGHT = 176;
const STRIP = { x: 118, y: 40, width: 586, height: 110 };
const COLUMNS = 240;
const S = 1e6, DAY = 86_400e6;

/** Twenty requests around 10 s, and six around 19.5 s. */
const burst = (verb) => [[9, 20], [19.4, 6]].flatMap(([begin, n]) =>
  Array.from({ length: n }, (_, i) => ({ at: Math.round((begin + i / 10) * S), cost: 1, verb })));

const full = (kind, more) => ({ limit: 'x', kind, rate: 10, period_us: 10 * S, capacity: 10, value: 10, ts_us: 0, now_us: 0, ...more });
const seconds = [0, 10, 20].map((at) => [at * S, `${at} s`]);

const PICTURES = {
  token: { title: 'Token bucket: 10 in 10 s', start: full('token bucket'), arrivals: burst('take'), span: 24 * S, period: 10 * S, ticks: seconds },
  window: { title: 'Fixed window: 10 in 10 s', start: full('fixed window'), arrivals: burst('take'), span: 24 * S, period: 10 * S, ticks: seconds },
  sliding: {
    title: 'Sliding window: never more than 10 in any 10 s', start: full('sliding window', { slices: 20, totals: [0, 0] }),
    arrivals: burst('take'), span: 24 * S, period: 10 * S, ticks: seconds,
  },
  calendar: {
    title: 'Calendar window: 10 a month', period: 31 * DAY,
    start: full('calendar window', {
      windows: [{ period_us: 31 * DAY, until_us: 31 * DAY }, { period_us: 28 * DAY, start_us: 3 * DAY, until_us: 59 * DAY }, { period_us: 31 * DAY, start_us: 28 * DAY }],
    }),
    draws: 'window',
    arrivals: Array.from({ length: 36 }, (_, i) => ({ at: (22 + i) * DAY, cost: 1, verb: 'take' })),
    span: 90 * DAY, ticks: [[0, '1 January'], [31 * DAY, '1 February'], [59 * DAY, '1 March']],
  },
  slots: {
    title: 'Concurrency: 3 at a time, for 2 s each', start: { limit: 'x', kind: 'concurrency', capacity: 3, lease_us: 2 * S, ends_us: [], ts_us: 0, now_us: 0 },
    arrivals: burst('take'), span: 24 * S, period: 10 * S, ticks: seconds,
  },
  spacing: {
    title: 'Spacing: 1 a second, none kept, reserved', start: full('token bucket', { rate: 1, period_us: S, capacity: 0, value: 0 }), draws: 'token',
    arrivals: burst('reserve'), span: 40 * S, period: 10 * S, ticks: [...seconds, [30 * S, '30 s'], [40 * S, '40 s']],
  },
};

const busiestOf = (lane, period) => `at most ${Math.max(...lane.runs.map((r) => r.most))} in any ${period < DAY ? `${period / S} s` : `${period / DAY} days`}`;

const TOLD = {
  slots: (lane) => `at most ${lane.start.capacity - Math.min(...lane.events.map((e) => e.tokens))} at a time`,
  spacing: (lane) => `at least ${Math.min(...lane.runs.slice(1).map((r, i) => Math.round((r.at - lane.runs[i].at) / 1000))) / 1000} s apart`,
};

/** The colours of the page: each has one for light and one for dark. */
const colours = [...style.matchAll(/(--[\w-]+): light-dark\((#\w+), (#\w+)\);/g)];
const palette = (i) => colours.map((found) => `${found[1]}:${found[i]}`).join(';');
const drawn = ['inside', 'outline', 'water', 'surface', 'marks', 'below', 'held', 'owed', 'curve', 'zero', 'line', 'strip', 'admitted', 'refused', 'reserved', 'runs'];
const rules = style.split('\n').filter((line) => /^[.\w:()[\]=', -]+ \{.*\}$/.test(line) && drawn.some((name) => line.startsWith(`.${name}`)) && !/display|grid-area/.test(line));
const css = `:root{${palette(2)}} @media (prefers-color-scheme: dark){:root{${palette(3)}}}
text{fill:var(--soft);font:13px system-ui,sans-serif} .title{fill:var(--ink);font-size:15px;font-weight:600} .card{fill:var(--card);stroke:var(--edge)}
${rules.join('\n')}`;

const files = {};
for (const [id, { title, start, arrivals, span, period, ticks, draws = id }] of Object.entries(PICTURES)) {
  const lane = run({ id: draws, start, maxReserved: Infinity, queues: false }, arrivals, period);
  const bucket = createBucket(draws), strip = createStrip(COLUMNS);
  const last = lane.events.at(-1), deepest = Math.min(...lane.events.map((e) => e.tokens), 0);
  strip.draw(lane, { span });
  bucket.draw(last.tokens, start.capacity, deepest);
  strip.element.querySelectorAll('.veil, .cursor').forEach((part) => part.remove());
  for (const [element, place] of [[strip.element, STRIP], [bucket.element, { x: 14, y: 38, width: 90, height: 120 }]]) {
    element.removeAttribute('role');
    element.removeAttribute('aria-label');
    for (const [name, value] of Object.entries(place)) element.setAttribute(name, value);
  }
  const told = `${lane.events.filter((e) => e.ok).length} of ${arrivals.length} admitted; ${TOLD[id]?.(lane) ?? busiestOf(lane, period)}`;
  const x = (at) => STRIP.x + (at / span) * STRIP.width;
  const picture = svg('svg', { xmlns: 'http://www.w3.org/2000/svg', viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, role: 'img' },
    svg('title'), svg('style'), svg('rect', { x: 0.5, y: 0.5, width: WIDTH - 1, height: HEIGHT - 1, rx: 10, class: 'card' }),
    svg('text', { x: 14, y: 25, class: 'title' }), svg('text', { x: WIDTH - 14, y: 25, 'text-anchor': 'end' }), bucket.element, strip.element,
    ...ticks.map(([at, text]) => {
      const tick = svg('text', { x: x(at).toFixed(1), y: HEIGHT - 10, 'text-anchor': at === span ? 'end' : 'start' });
      tick.textContent = text;
      return tick;
    }));
  const [name, sheet, , heading, figures] = picture.children;
  name.textContent = `${title}. ${told}`;
  sheet.textContent = css;
  heading.textContent = title;
  figures.textContent = told;
  files[`kind-${id}.svg`] = { text: `${new XMLSerializer().serializeToString(picture)}\n`, told };
}
return files;
