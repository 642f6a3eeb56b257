// A bucket as a drawing, which fills and empties. What it owes hangs below it.
import { set, svg } from './draw.js';

const TOP = 16, BOTTOM = 100, DEPTH = 26; // of the inside, and of the owed tokens below

/** The outlines, open at the top: of a bucket, of boxes that are not filled drop by drop, and of a bucket with a hole. */
const OUTLINES = {
  token: 'M14 10 L24 92 Q25 100 33 100 L67 100 Q75 100 76 92 L86 10',
  window: 'M16 10 L16 96 Q16 100 20 100 L80 100 Q84 100 84 96 L84 10',
  sliding: 'M8 10 L8 96 Q8 100 12 100 L88 100 Q92 100 92 96 L92 10',
  slots: 'M30 10 L30 96 Q30 100 34 100 L66 100 Q70 100 70 96 L70 10',
  leaky: 'M22 10 L22 62 Q22 70 29 75 L45 88 L45 100 L55 100 L55 88 L71 75 Q78 70 78 62 L78 10',
};
const MOST_MARKS = 12; // of single tokens

/** Returns a drawing of the kind, which shows nothing yet. draw(tokens, capacity, deepest) shows a level. */
export function createBucket(kind) {
  const water = svg('rect', { x: 0, width: 100, class: 'water' });
  const surface = svg('line', { x1: 0, x2: 100, class: 'surface' });
  const marks = svg('path', { class: 'marks' });
  const below = svg('rect', { x: 34, width: 32, y: BOTTOM + 4, rx: 3, class: 'below' });
  const clip = `inside-${kind}`;
  const element = svg('svg', { viewBox: '0 0 100 134', class: 'bucket', role: 'img', 'aria-label': '' },
    svg('clipPath', { id: clip }, svg('path', { d: `${OUTLINES[kind]} Z` })),
    svg('g', { 'clip-path': `url(#${clip})` }, svg('path', { d: `${OUTLINES[kind]} Z`, class: 'inside' }), water, marks, surface),
    svg('path', { d: OUTLINES[kind], class: 'outline' }),
    below);
  let marked = NaN;

  function mark(capacity) {
    marked = capacity;
    const lines = [];
    for (let i = 1; capacity <= MOST_MARKS && i < capacity; i++) {
      lines.push(`M0 ${(BOTTOM - (i / capacity) * (BOTTOM - TOP)).toFixed(1)} H100`);
    }
    set(marks, { d: lines.join('') });
  }

  return {
    element,
    draw(tokens, capacity, deepest) {
      if (marked !== capacity) mark(capacity);
      const level = capacity > 0 ? Math.max(tokens, 0) / capacity : 0;
      const y = (BOTTOM - level * (BOTTOM - TOP)).toFixed(2);
      set(water, { y, height: (BOTTOM - y).toFixed(2) });
      set(surface, { y1: y, y2: y, visibility: level > 0 ? 'visible' : 'hidden' });
      const owed = deepest < 0 ? Math.min(Math.min(tokens, 0) / deepest, 1) : 0;
      set(below, { height: (owed * DEPTH).toFixed(2) });
    },
  };
}
