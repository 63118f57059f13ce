// Creates and places elements, and formats numbers.

/**
 * Creates an element. A function as attribute value becomes an event listener; true sets an empty
 * attribute; false, null and undefined leave it out.
 *
 * @param {string} tag
 * @param {Object} attributes
 * @param {...(Node|string)} children
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** True if the user touches the screen and has no pointer that hovers. */
export const isTouch = matchMedia("(hover: none)").matches;

/** Returns the element with this id. */
export const findById = (id) => document.getElementById(id);

/** Sets the text of an element; hides the element if the text is empty. */
export function setText(element, text) {
  element.textContent = text ?? "";
  element.hidden = !text;
}

/** Places a popup below an element, or above it at the end of the window. */
export function placeBeside(popup, element) {
  const { left, top, bottom } = element.getBoundingClientRect();
  const { width, height } = popup.getBoundingClientRect();
  const y = bottom + height + 14 > innerHeight ? top - height - 6 : bottom + 6;
  popup.style.left = `${Math.max(8, Math.min(left, document.documentElement.clientWidth - width - 8))}px`;
  popup.style.top = `${Math.max(8, y)}px`;
}

/** Returns names as a list in a sentence: a, b and c. */
export function joinNames(names) {
  const before = names.slice(0, -1);
  return before.length ? `${before.join(", ")} and ${names.at(-1)}` : names[0];
}

/** Formats a number with about this many significant digits. */
export function formatNumber(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10 ** digits && size < 1e6) return String(Math.round(value)).replace("-", "−");
  const text = size < 1e-3 || size >= 1e6 ? value.toExponential(2) : value.toPrecision(digits);
  return (text.includes("e") ? text : String(Number(text))).replaceAll("-", "−");
}

/** Formats a number with fixed decimals, for columns. */
export function formatFixed(value, decimals = 4) {
  if (!Number.isFinite(value)) return formatNumber(value);
  return value.toFixed(decimals).replace("-", "−");
}

/** Formats milliseconds as s, ms or µs. */
export function formatTime(ms) {
  if (!Number.isFinite(ms)) return "–";
  if (ms >= 1000) return `${(ms / 1000).toPrecision(3)} s`;
  return ms >= 0.1 ? `${Number(ms.toPrecision(3))} ms` : `${Number((ms * 1000).toPrecision(3))} µs`;
}

/** Formats a count with a prefix, such as 1.2 G; with a unit, in powers of 1024: 3.4 MiB. */
export function formatCount(value, unit = "") {
  const step = unit ? 1024 : 1000;
  if (!Number.isFinite(value)) return "–";
  const prefixes = step === 1024 ? ["", "Ki", "Mi", "Gi", "Ti"] : ["", "k", "M", "G", "T", "P"];
  let power = 0;
  let rest = value;
  while (rest >= step && power < prefixes.length - 1) {
    rest /= step;
    power += 1;
  }
  return `${Number(rest.toPrecision(3))} ${prefixes[power]}${unit}`.trim();
}

/** Returns a function that calls `callback` after `ms` without another call. */
export function debounce(callback, ms) {
  let timer = 0;
  const debounced = (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => callback(...values), ms);
  };
  debounced.cancel = () => clearTimeout(timer);
  return debounced;
}

/** Waits for the next task of the browser, which responds to the user in between. */
export const nextTask = () => new Promise((resolve) => setTimeout(resolve));
