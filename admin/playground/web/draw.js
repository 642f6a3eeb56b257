// Elements of the page, made without any HTML in text.

const SVG = 'http://www.w3.org/2000/svg';

/** Returns a new element of SVG. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Returns a new element of HTML. */
export function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Sets the text of an element, where it is another one. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Sets attributes of an element, where they are others. */
export function set(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (element.getAttribute(key) !== String(value)) element.setAttribute(key, value);
  }
}
