// The settings as sliders, fields and choices.
import { html, set, write } from './draw.js';
import { number } from './format.js';
import { CHOICES, NUMBERS, numberOf, problem } from './settings.js';

const STEPS = 300; // at the most, of a slider: equal steps are equal ratios

/** Returns the values of a slider: no two are the same, so that each step changes something. */
function valuesOf({ min, max, whole, optional }) {
  const low = min || 1, values = [min];
  for (let i = 1; i < STEPS; i++) {
    const value = Number((low * (max / low) ** (i / STEPS)).toPrecision(2));
    values.push(whole ? Math.round(value) : value);
  }
  return [...new Set([...values, max, ...(optional ? [null] : [])])];
}

/** Returns whether a setting makes a difference. */
function matters(name, { pattern, verb, third, leaky, capacity }, preset) {
  const own = pattern === 'preset';
  const used = (setting) => own && preset.uses?.includes(setting);
  switch (name) {
    case 'load': return !own || used('load');
    case 'burst': return pattern === 'bursty';
    case 'seed': return pattern === 'poisson' || used('seed');
    case 'maxReserved': return verb === 'reserve' || (third === 'leaky' && leaky === 'queue' && capacity === 0) || used('maxReserved');
    case 'leaky': return third === 'leaky';
    case 'slices': return third === 'sliding';
    case 'most': case 'hold': return third === 'slots';
    default: return true;
  }
}

/**
 * Returns the controls. change(name, value) is called when one is moved, with what is allowed only.
 * show(settings, preset) shows what is set.
 */
export function createControls(change) {
  const limit = html('fieldset', {}, html('legend', {}, 'Limit'));
  const load = html('fieldset', {}, html('legend', {}, 'Load'));
  const shown = {};

  function addNumber(to, name) {
    const { label, unit, min, max, whole, optional } = NUMBERS[name], values = valuesOf(NUMBERS[name]);
    const field = html('input', {
      id: name, type: 'number', autocomplete: 'off', min, max, step: whole ? 1 : 'any', inputmode: 'decimal', 'aria-describedby': `${name}-unit ${name}-wrong`,
    });
    const slider = html('input', { id: `${name}-slider`, type: 'range', autocomplete: 'off', min: 0, max: values.length - 1, step: 1, 'aria-label': `${label}, slider` });
    const wrong = html('span', { id: `${name}-wrong`, class: 'wrong' });
    field.addEventListener('input', () => {
      const value = field.value === '' && optional && !field.validity.badInput ? null : numberOf(field.value);
      const error = problem(name, value);
      write(wrong, error ? error.replace(name, label) : '');
      set(field, { 'aria-invalid': Boolean(error) });
      if (!error) change(name, value, field);
    });
    slider.addEventListener('input', () => change(name, values[slider.value], slider));
    const row = html('div', { class: 'field' },
      html('label', { for: name }, label), field, html('span', { id: `${name}-unit`, class: 'unit' }, unit), slider, wrong);
    to.append(row);
    shown[name] = (value, source) => {
      const text = value === null ? 'no bound' : `${number(value)} ${unit}`;
      if (source !== field) {
        field.value = value ?? '';
        write(wrong, '');
        set(field, { 'aria-invalid': false });
      }
      if (source !== slider) slider.value = values.findLastIndex((v) => (value === null || v === null ? v === value : v <= value));
      set(slider, { 'aria-valuetext': text });
      return row;
    };
  }

  function addChoice(to, name) {
    const { label, of } = CHOICES[name];
    const select = html('select', { id: name, autocomplete: 'off' }, ...Object.entries(of).map(([value, text]) => html('option', { value }, text)));
    select.addEventListener('change', () => change(name, select.value, select));
    const row = html('div', { class: 'field choice' }, html('label', { for: name }, label), select);
    to.append(row);
    shown[name] = (value) => {
      select.value = value;
      return row;
    };
    return select;
  }

  for (const name of ['rate', 'period', 'capacity', 'cost']) addNumber(limit, name);
  addChoice(limit, 'verb');
  addNumber(limit, 'maxReserved');
  for (const name of ['third', 'leaky']) addChoice(limit, name);
  for (const name of ['slices', 'most', 'hold']) addNumber(limit, name);
  const own = addChoice(load, 'pattern').querySelector('[value=preset]');
  for (const name of ['load', 'burst', 'seed', 'span']) addNumber(load, name);

  return {
    elements: [limit, load],
    show(settings, preset, source) {
      own.hidden = own.disabled = !preset.script;
      for (const [name, show] of Object.entries(shown)) show(settings[name], source).hidden = !matters(name, settings, preset);
    },
  };
}
