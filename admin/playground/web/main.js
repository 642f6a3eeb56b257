// The page: which preset and settings, at which instant, and what of the page follows from them.
import { createControls } from './controls.js';
import { html, set, write } from './draw.js';
import { number, time } from './format.js';
import { SHORTCUTS, listen } from './keys.js';
import { createLane } from './lane.js';
import { MOST } from './load.js';
import { FASTEST, SLOWEST, createPlayer } from './player.js';
import { PRESETS } from './presets.js';
import { DEFAULTS, fromFragment, toFragment } from './settings.js';
import { simulate } from './simulate.js';

const $ = (id) => document.getElementById(id);
const SPEED_STEPS = 100;
const COARSE_MS = 500; // between pictures, for who wants little motion

const stillness = matchMedia('(prefers-reduced-motion: reduce)');
const dark = matchMedia('(prefers-color-scheme: dark)');
const lanes = new Map(['token', 'window', 'leaky', 'sliding', 'slots'].map((id) => [id, createLane(id)]));
let preset, settings, history, ran = false;

const player = createPlayer({
  now: () => performance.now(),
  frame: (run) => (stillness.matches ? setTimeout(run, COARSE_MS) : requestAnimationFrame(run)),
  changed: showTime,
});
const controls = createControls((name, value, source) => use(preset, { ...settings, [name]: value }, player.at, { source }));

/** Tells who cannot see it, and not while time runs. */
const say = (text) => write($('said'), text);

/**
 * Begins a simulation, at an instant of it. source is the control that was moved, if one was: it shows what was typed, and
 * time goes on if it runs. error is what is wrong with the link.
 */
function use(nextPreset, nextSettings, at, { source, error = '' } = {}) {
  [preset, settings] = [nextPreset, nextSettings];
  history = simulate(settings, preset.script);
  for (const lane of history.lanes) lanes.get(lane.id).load(lane, history);
  if (shown().some(({ element }, i) => $('lanes').children[i] !== element)) $('lanes').replaceChildren(...shown().map((lane) => lane.element));
  controls.show(settings, preset, source);
  const changed = Object.keys(DEFAULTS).some((name) => settings[name] !== preset.settings[name]);
  write($('story'), preset.story);
  $('refused').hidden = !error;
  write($('refused'), error && `The link is not used: ${error}. This is the first example.`);
  $('changed').hidden = !changed;
  $('capped').hidden = history.arrivals.length < MOST;
  $(`preset-${preset.id}`).checked = true;
  set($('scrub'), { max: history.span });
  write($('end'), time(history.span));
  player.load(history, at, source !== undefined);
}

function pick(next) {
  use(next, next.settings, 0);
  player.setSpeed(next.speed);
  say(`${next.title}. ${next.story}`);
}

function showTime() {
  const { at, running } = player;
  for (const lane of shown()) lane.show(at);
  write($('time'), time(at));
  $('scrub').value = at;
  set($('scrub'), { 'aria-valuetext': `${time(at)} of ${time(history.span)}` });
  write($('run'), running ? 'Pause' : 'Play');
  set($('run'), { 'data-running': running });
  write($('speed-told'), `${number(player.speed)}×`);
  $('speed').value = Math.round((Math.log(player.speed / SLOWEST) / Math.log(FASTEST / SLOWEST)) * SPEED_STEPS);
  set($('speed'), { 'aria-valuetext': `${number(player.speed)} simulated seconds a second` });
  if (!running) showLink();
  if (ran && !running && player.ended) say(`The end. ${told()}`);
  ran = running;
}

/** The lanes that are seen. */
const shown = () => history.lanes.map(({ id }) => lanes.get(id));

/** What each limit said last, and holds. */
const told = () => `${time(player.at)}. ${shown().map((lane) => lane.summary).join(' ')}`;

/** Keeps the address up to date, so that it can be copied. */
function showLink() {
  const fragment = toFragment(preset, settings, player.at);
  set($('link'), { href: fragment });
  if (fragment === location.hash) return;
  try {
    window.history.replaceState(null, '', fragment);
  } catch { /* a page that has no address of its own */ }
}

function follow(fragment) {
  const link = fromFragment(fragment, PRESETS);
  use(link.preset, link.settings, link.at, { error: link.error });
  player.setSpeed(link.preset.speed);
}

function step(move) {
  move();
  say(told());
}

function toggle() {
  player.toggle();
  say(player.running ? 'Time runs.' : `Time stands still at ${time(player.at)}.`);
}

const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? 'dark' : 'light')) === 'dark';
const showTheme = () => set($('theme'), { 'aria-pressed': isDark() });

function theme() {
  document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
  showTheme();
}

const neighbour = (by) => pick(PRESETS[(PRESETS.indexOf(preset) + by + PRESETS.length) % PRESETS.length]);
const actions = {
  toggle, theme,
  forward: () => step(() => player.forward()),
  back: () => step(() => player.back()),
  restart: () => step(() => player.seek(0)),
  slower: () => player.setSpeed(player.speed / 2),
  faster: () => player.setSpeed(player.speed * 2),
  next: () => neighbour(1),
  previous: () => neighbour(-1),
};

function build() {
  for (const p of PRESETS) {
    const radio = html('input', { type: 'radio', autocomplete: 'off', name: 'preset', id: `preset-${p.id}`, value: p.id });
    radio.addEventListener('change', () => pick(p));
    $('presets').append(radio, html('label', { for: `preset-${p.id}` }, p.title));
  }
  $('controls').append(...controls.elements);
  for (const [key, does] of SHORTCUTS) {
    $('shortcuts').append(html('div', {}, html('dt', {}, html('kbd', {}, key === ' ' ? 'Space' : key)), html('dd', {}, does)));
  }
  for (const id of ['forward', 'back', 'restart', 'theme']) $(id).addEventListener('click', actions[id]);
  $('run').addEventListener('click', toggle);
  $('undo').addEventListener('click', () => pick(preset));
  $('scrub').addEventListener('input', () => player.seek(Number($('scrub').value)));
  $('speed').addEventListener('input', () => {
    const speed = SLOWEST * (FASTEST / SLOWEST) ** ($('speed').value / SPEED_STEPS);
    player.setSpeed(Number(speed.toPrecision(2)));
  });
  listen(actions, () => $('keys').checked);
  dark.addEventListener('change', showTheme);
  addEventListener('hashchange', () => follow(location.hash)); // what showLink writes causes none
  showTheme();
  const isLinked = location.hash !== ''; // to an instant
  follow(location.hash);
  if (!isLinked && !stillness.matches) player.toggle();
}

build();
