// The axes of the chart of a sweep, both logarithmic, and what all its parts are drawn with.
//
// Colours are CSS variables with defaults: --chart-ink and --chart-grid.

import { readUnit, SANS } from "../theme.js";
import { formatInteger, formatMilliseconds } from "./sweep_table.js";

const NS = "http://www.w3.org/2000/svg";

/** Creates an empty chart. */
export const createChart = () => document.createElementNS(NS, "svg");

/** Computes the scales of lengths and times for the width and the labels. */
export function computeScales(svg, cells, variants, lengths) {
  const width = Math.max(svg.clientWidth ? svg.clientWidth / readUnit() : 640, 280);
  const height = Math.max(Math.min(Math.round(width * 0.6), 420), 260);
  const longest = Math.max(...variants.map((label) => label.length), 0);
  const right = width - Math.min(longest * 7.2 + 24, width * 0.35);
  const edges = { left: 56, right, top: 16, bottom: height - 44 };
  const times = cells.flatMap((c) => [c.least_ms, c.most_ms]).filter((ms) => ms > 0);
  const low = times.length ? Math.min(...times) : 0.1;
  const high = times.length ? Math.max(...times) : 10;
  const first = Math.min(...lengths, Infinity);
  const last = Math.max(...lengths, 0);
  const x = logScale(Number.isFinite(first) ? first : 256, last || 4096, edges.left + 8, right - 8);
  const y = logScale(low / 1.3, high * 1.3, edges.bottom, edges.top);
  return { width, height, ...edges, x, y, low: low / 1.3, high: high * 1.3, lengths, longest };
}

function logScale(low, high, from, to) {
  if (low === high) return () => (from + to) / 2;
  const part = (value) => Math.log(Math.max(value, low) / low) / Math.log(high / low);
  return (value) => from + (to - from) * part(value); // a coarse clock can measure 0
}

/** Draws the axes, with their ticks and titles. */
export function drawAxes(svg, { left, right, top, bottom, height, x, y, low, high, lengths }) {
  for (const time of timeTicks(low, high)) {
    addElement(svg, "path", { d: `M${left} ${y(time)}H${right}`, stroke: gridColour() });
    addElement(
      svg,
      "text",
      { x: left - 6, y: y(time) + 4, "text-anchor": "end", ...fontAttributes() },
      formatMilliseconds(time),
    );
  }
  let nextFree = -Infinity;
  for (const length of [...new Set(lengths)].sort((a, b) => a - b)) {
    const text = formatInteger(length);
    if (x(length) - text.length * 3.3 < nextFree) continue;
    nextFree = x(length) + text.length * 3.3 + 8;
    addElement(svg, "path", { d: `M${x(length)} ${bottom}v5`, stroke: inkColour() });
    addElement(
      svg,
      "text",
      { x: x(length), y: bottom + 18, "text-anchor": "middle", ...fontAttributes() },
      text,
    );
  }
  addElement(svg, "path", { d: `M${left} ${bottom}H${right}`, stroke: inkColour() });
  addElement(
    svg,
    "text",
    { x: (left + right) / 2, y: height - 8, "text-anchor": "middle", ...fontAttributes() },
    "length, log scale",
  );
  const rotation = `translate(14 ${(top + bottom) / 2}) rotate(-90)`;
  addElement(
    svg,
    "text",
    { transform: rotation, "text-anchor": "middle", ...fontAttributes() },
    "ms per call, log scale",
  );
}

/** Draws the slopes of a time that doubles, and that quadruples, when the length doubles. */
export function drawGuides(svg, { x, y, low, high, lengths }) {
  const [first, last] = [Math.min(...lengths), Math.max(...lengths)];
  if (!(first < last)) return;
  for (const power of [1, 2]) {
    const end = Math.min(last, first * (high / low) ** (1 / power));
    const [right, top] = [x(end), y(low * (end / first) ** power)];
    addElement(svg, "path", {
      d: `M${x(first)} ${y(low)}L${right} ${top}`,
      fill: "none",
      stroke: inkColour(),
      "stroke-dasharray": "2 5",
      "data-guide": 2 ** power,
    });
    const place = { x: right - 9, y: top + 5, "text-anchor": "end" };
    const text = `×${2 ** power}`;
    const label = addElement(svg, "text", { ...place, ...fontAttributes() }, text);
    addElement(label, "title", {}, `${2 ** power} times the time for twice the length`);
  }
}

/** Returns 1, 2 and 5 of each power of ten between two times; only 1 for a wide range. */
function timeTicks(low, high) {
  const steps = Math.log10(high / low) > 3 ? [1] : [1, 2, 5];
  const all = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    all.push(...steps.map((step) => step * 10 ** power));
  }
  return all.filter((time) => time >= low && time <= high);
}

/** The colour of lines and texts. */
export function inkColour() {
  return "var(--chart-ink, currentColor)";
}

function gridColour() {
  return "var(--chart-grid, #8884)";
}

/** The attributes of a text. */
export function fontAttributes() {
  return { fill: inkColour(), "font-size": 12, "font-family": SANS };
}

/** Adds an element of SVG to a parent, or to none, and returns it. */
export function addElement(parent, name, attributes, text) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.append(text);
  parent?.append(element);
  return element;
}
