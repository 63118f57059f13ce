// Shows the formula of a variant; each of its symbols is a button that points to a step.

import { h } from "../dom.js";
import { typeset } from "../typeset.js";

/**
 * Splits a formula at the symbols of steps. A character belongs to the shortest symbol around it.
 *
 * @param {string} formula
 * @param {Array<{name: string, symbol: string|null}>} steps
 * @returns {{parts: Array<{text: string, name: string|null, start: number}>,
 *   ranges: Map<string, number[]>}} `ranges`: first and last index of each step's symbol
 */
export function splitFormula(formula, steps) {
  const ranges = new Map();
  for (const { name, symbol } of steps) {
    const start = symbol ? formula.indexOf(symbol) : -1;
    if (start >= 0) ranges.set(name, [start, start + symbol.length]);
  }
  const owners = Array(formula.length).fill(null);
  const longestFirst = [...ranges].sort(([, a], [, b]) => b[1] - b[0] - (a[1] - a[0]));
  for (const [name, [start, end]] of longestFirst) owners.fill(name, start, end);
  const parts = [];
  owners.forEach((name, at) => {
    const character = formula[at];
    const owner = character === " " ? null : name; // spaces between symbols are no part of a button
    if (parts.length && parts.at(-1).name === owner) parts.at(-1).text += character;
    else parts.push({ text: character, name: owner, start: at });
  });
  return { parts, ranges };
}

/**
 * Shows a formula.
 *
 * @param {HTMLElement} root
 * @param {string} formula
 * @param {Array<Object>} steps with a figure; empty: plain text
 * @param {{onPoint: (name: string|null) => void, onChoose: (name: string) => void}} callbacks
 *   `onPoint`: called when pointer or focus enters and leaves a symbol
 * @returns {(name: string|null) => void} marks the symbol of a step
 */
export function showFormula(root, formula, steps, { onPoint, onChoose }) {
  const { parts, ranges } = splitFormula(formula, steps);
  const seen = new Set();
  const elements = parts.map(({ text, name }) => {
    if (!name) return text.trim() ? h("span", {}, ...typeset(text)) : document.createTextNode(text);
    const events = {
      pointerenter: () => onPoint(name),
      pointerleave: () => onPoint(null),
      focus: () => onPoint(name),
      blur: () => onPoint(null),
      click: () => onChoose(name),
    };
    const nodes = typeset(text);
    if (seen.has(name)) return h("span", { class: "symbol", ...events }, ...nodes);
    seen.add(name);
    const { symbol } = steps.find((one) => one.name === name);
    const label = `${text}: step ${name}, ${symbol}`;
    return h(
      "button",
      { type: "button", class: "symbol", "aria-label": label, ...events },
      ...nodes,
    );
  });
  root.replaceChildren(...elements);
  return (name) => {
    const [start, end] = ranges.get(name) ?? [0, 0];
    parts.forEach(({ start: at, text }, i) => {
      const isIn = at >= start && at + text.length <= end;
      elements[i].classList?.toggle("lit", isIn);
    });
  };
}
