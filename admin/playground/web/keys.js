// Shortcuts of the keyboard. Each is a single key, so they can be switched off on the page.

/** What each key does, and the action that does it, in the order of the list on the page. */
export const SHORTCUTS = [
  [' ', 'play or pause', 'toggle'],
  ['.', 'step to the next event', 'forward'],
  [',', 'step back', 'back'],
  ['0', 'back to the beginning', 'restart'],
  ['[', 'slower', 'slower'],
  [']', 'faster', 'faster'],
  ['n', 'next example', 'next'],
  ['p', 'previous example', 'previous'],
  ['d', 'dark or light', 'theme'],
];

const BY_KEY = new Map(SHORTCUTS.map(([key, , action]) => [key, action]));

/** Keys that an element has a use for itself are left to it. */
function isTaken(element, key) {
  if (element.closest('input:not([type=range], [type=radio], [type=checkbox]), select, textarea')) return true;
  return key === ' ' && element.closest('button, summary, a, input') !== null;
}

/** Calls actions[name]() when a key is pressed, while enabled() is true. */
export function listen(actions, enabled) {
  document.addEventListener('keydown', (event) => {
    const action = BY_KEY.get(event.key);
    const target = event.target instanceof Element ? event.target : document.body;
    if (!action || !enabled() || event.ctrlKey || event.metaKey || event.altKey || isTaken(target, event.key)) return;
    event.preventDefault();
    actions[action]();
  });
}
