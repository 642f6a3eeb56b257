// A lane as a strip over time: above what it holds, below each request, admitted or refused, and when work runs.
import { set, svg } from './draw.js';
import { levels } from './simulate.js';

const WIDTH = 1000, COLUMNS = 500;
const FULL = 8, FLOOR = 74, ASKED = 98; // where the bucket is full, the floor of the drawing of levels, and the line of requests
const HEIGHT = 122;

/** Returns an empty strip. draw(lane, span) shows a history, by so many columns, and show(at) how far it has come. */
export function createStrip(columns = COLUMNS) {
  const part = (name) => svg('path', { class: name, 'vector-effect': 'non-scaling-stroke' });
  const held = part('held'), owed = part('owed'), level = part('curve'), zero = part('zero'), line = part('line');
  const admitted = part('admitted'), refused = part('refused'), reserved = part('reserved'), runs = part('runs');
  const veil = svg('rect', { y: 0, height: HEIGHT, class: 'veil' });
  const cursor = svg('line', { y1: 0, y2: HEIGHT, class: 'cursor', 'vector-effect': 'non-scaling-stroke' });
  const element = svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', class: 'strip', role: 'img', 'aria-label': '' },
    held, owed, zero, level, line, reserved, admitted, refused, runs, veil, cursor);
  let span = 1;
  const x = (at) => ((at / span) * WIDTH).toFixed(2);

  function drawLevels(lane, deepest) {
    const { capacity } = lane.start;
    const room = capacity - deepest || 1;
    const y = (tokens) => FULL + ((capacity - tokens) / room) * (FLOOR - FULL);
    const points = levels(lane, span, columns);
    const curve = (of) => points.map(([at, tokens]) => `${x(at)} ${y(of(tokens)).toFixed(1)}`).join('L');
    const bottom = y(0).toFixed(1);
    const area = (of) => `M0 ${bottom}L${curve(of)}L${WIDTH} ${bottom}Z`;
    set(level, { d: `M${curve((n) => n)}` });
    set(held, { d: area((n) => Math.max(n, 0)) });
    set(owed, { d: area((n) => Math.min(n, 0)) });
    set(zero, { d: `M0 ${bottom}H${WIDTH}` });
  }

  return {
    element,
    draw(lane, history) {
      span = history.span;
      const deepest = deepestOf(lane);
      drawLevels(lane, deepest);
      const marks = { admitted: [], refused: [], reserved: [], runs: [] };
      for (const e of lane.events) {
        if (!e.ok) marks.refused.push(`M${x(e.at)} ${ASKED + 4}v13`);
        else if (e.readyAtUs === e.at) marks.admitted.push(`M${x(e.at)} ${ASKED - 4}v-16`);
        else {
          marks.reserved.push(`M${x(e.at)} ${ASKED - 4}v-7`);
          if (e.readyAtUs <= span) marks.runs.push(`M${x(e.readyAtUs)} ${ASKED - 4}v-16`);
        }
      }
      set(line, { d: `M0 ${ASKED}H${WIDTH}` });
      set(admitted, { d: marks.admitted.join('') });
      set(refused, { d: marks.refused.join('') });
      set(reserved, { d: marks.reserved.join('') });
      set(runs, { d: marks.runs.join('') });
      element.dataset.marks = densityOf(lane.events, span);
    },
    show(at) {
      const from = x(at);
      set(veil, { x: from, width: (WIDTH - from).toFixed(2) });
      set(cursor, { x1: from, x2: from });
    },
  };
}

/** Returns how close most requests are to the next, at the usual width. */
function densityOf(events, span) {
  const gaps = events.slice(1).map((e, i) => e.at - events[i].at).sort((a, b) => a - b);
  const usual = ((gaps[Math.floor(gaps.length / 4)] ?? span) / span) * COLUMNS;
  return usual < 3 ? 'many' : usual < 6 ? 'some' : 'few';
}

/** Returns the most that a lane ever owes, as a number below 0, or 0. */
export const deepestOf = (lane) => lane.events.reduce((least, e) => Math.min(least, e.tokens), 0);
