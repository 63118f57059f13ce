// Draws a sweep as a line chart: time by length, both axes logarithmic.
//
// Colours are CSS variables with defaults: --chart-ink, --chart-grid, and --chart-1 to --chart-8 for
// the variants. Each variant also has a marker of its own.

import { SANS } from "../theme.js";
import {
  describeCrossover,
  describeSweep,
  formatCell,
  formatInteger,
  formatMilliseconds,
} from "./sweep_table.js";

export { fillSweepTable } from "./sweep_table.js";

const NS = "http://www.w3.org/2000/svg";
const COLOURS = [
  "#3b82f6",
  "#d9730d",
  "#0f9d8a",
  "#c2489b",
  "#8a8a00",
  "#e0444a",
  "#8b5cf6",
  "#6b7f95",
];
const MARKERS = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
  "M-3.5-3.5h7v7h-7z",
  "M0-4.5 4.5 3.5h-9z",
  "M0-5 5 0 0 5-5 0z",
  "M0 4.5 4.5-3.5h-9z",
  "M-5-1.5h3.5v-3.5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5z",
  "M0-5 4.8-1.5 3 4h-6L-4.8-1.5z",
  "M-2-5h4v10h-4z",
];
const LINE_HEIGHT = 15; // of a label, pixels
const MIN_LABEL_DISTANCE = 40; // between labelled crossovers, pixels; every ring has a title

/** Creates an empty chart. */
export const createChart = () => document.createElementNS(NS, "svg");

/**
 * Draws the measured cells; replaces an earlier drawing.
 *
 * @param {SVGSVGElement} svg its layout decides the width
 * @param {Object} sweep
 * @param {Object[]} sweep.cells from the events: index, length, and median_ms, least_ms,
 *     most_ms or a problem
 * @param {string[]} sweep.variants labels; `index` of a cell refers to them
 * @param {{from: number, to: number, length: number}[]} sweep.crossovers where medians are equal
 * @param {number[]} sweep.lengths of the whole sweep: the axis does not change while cells arrive
 */
export function drawSweep(svg, { cells, variants, crossovers = [], lengths = [] }) {
  const measured = cells.filter((cell) => !cell.problem);
  const scales = computeScales(
    svg,
    measured,
    variants,
    lengths.length ? lengths : cells.map((c) => c.length),
  );
  svg.setAttribute("viewBox", `0 0 ${scales.width} ${scales.height}`);
  svg.setAttribute("role", "img");
  const title = addElement(null, "title", {}, "Time per call by length");
  const desc = addElement(null, "desc", {}, describeSweep(measured, variants, crossovers));
  title.id = `${svg.id || "sweep"}-title`;
  desc.id = `${svg.id || "sweep"}-desc`;
  svg.setAttribute("aria-labelledby", title.id);
  svg.setAttribute("aria-describedby", desc.id);
  svg.replaceChildren(title, desc);
  drawAxes(svg, scales);
  const lines = variants.map((label, index) => ({
    label,
    index,
    points: measured.filter((c) => c.index === index).sort((a, b) => a.length - b.length),
  }));
  for (const line of lines) if (line.points.length) drawSeries(svg, scales, line);
  for (const cell of cells.filter((c) => c.problem)) drawMissing(svg, scales, cell, variants);
  const labelled = []; // positions of labels
  for (const crossover of crossovers)
    drawCrossover(svg, scales, crossover, lines, variants, labelled);
  drawLabels(svg, scales, lines);
}

/** Computes the scales of lengths and times for the width and the labels. */
function computeScales(svg, cells, variants, lengths) {
  const width = Math.max(svg.clientWidth || 640, 280);
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

function drawAxes(svg, { left, right, top, bottom, height, x, y, low, high, lengths }) {
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
    "length",
  );
  const rotation = `translate(14 ${(top + bottom) / 2}) rotate(-90)`;
  addElement(
    svg,
    "text",
    { transform: rotation, "text-anchor": "middle", ...fontAttributes() },
    "ms per call",
  );
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

function drawSeries(svg, { x, y }, { label, index, points }) {
  const at = (cell, ms) => `${x(cell.length).toFixed(1)} ${y(ms).toFixed(1)}`;
  const colour = colourFor(index);
  const band = [
    ...points.map((c) => at(c, c.most_ms)),
    ...points.toReversed().map((c) => at(c, c.least_ms)),
  ];
  addElement(svg, "path", {
    d: `M${band.join("L")}z`,
    fill: colour,
    "fill-opacity": 0.2,
    "data-band": label,
  });
  const line = points.map((c) => at(c, c.median_ms)).join("L");
  addElement(svg, "path", {
    d: `M${line}`,
    fill: "none",
    stroke: colour,
    "stroke-width": 2,
    "data-line": label,
  });
  for (const cell of points) {
    const position = { transform: `translate(${at(cell, cell.median_ms)})` };
    const marker = addElement(svg, "path", {
      d: MARKERS[index % MARKERS.length],
      fill: colour,
      "data-cell": "",
      ...position,
    });
    addElement(marker, "title", {}, `${label}, ${formatInteger(cell.length)}: ${formatCell(cell)}`);
  }
}

/** Draws a cross on the axis for a cell that could not run. */
function drawMissing(svg, { x, bottom }, cell, variants) {
  const position = { transform: `translate(${x(cell.length)} ${bottom - 8 - 10 * cell.index})` };
  const cross = addElement(svg, "path", {
    d: "M-4-4 4 4M4-4-4 4",
    stroke: colourFor(cell.index),
    "stroke-width": 2,
    "data-problem": "",
    ...position,
  });
  addElement(
    cross,
    "title",
    {},
    `${variants[cell.index]}, ${formatInteger(cell.length)}: ${formatCell(cell)}`,
  );
}

function drawCrossover(svg, scales, crossover, lines, variants, labelled) {
  const { x, y } = scales;
  const { points } = lines[crossover.from];
  const after = points.findIndex((cell) => cell.length >= crossover.length);
  if (after < 1) return;
  const [a, b] = [points[after - 1], points[after]];
  const part = Math.log(crossover.length / a.length) / Math.log(b.length / a.length);
  const at = [x(crossover.length), y(a.median_ms) + part * (y(b.median_ms) - y(a.median_ms))];
  const ring = addElement(svg, "circle", {
    cx: at[0],
    cy: at[1],
    r: 7,
    fill: "none",
    stroke: inkColour(),
    "data-crossover": "",
  });
  addElement(ring, "title", {}, describeCrossover(crossover, variants));
  if (labelled.some(([left, top]) => Math.hypot(left - at[0], top - at[1]) < MIN_LABEL_DISTANCE))
    return;
  labelled.push(at);
  addElement(
    svg,
    "text",
    { x: at[0], y: at[1] - 12, "text-anchor": "middle", ...fontAttributes() },
    formatInteger(crossover.length),
  );
}

/** Draws the names at the ends of the lines, moved apart so that none overlap. */
function drawLabels(svg, { y, right, top, bottom, width }, lines) {
  const labelled = lines.filter((line) => line.points.length);
  const positions = labelled
    .map((line) => ({ line, at: y(line.points.at(-1).median_ms) }))
    .sort((a, b) => a.at - b.at);
  for (let i = 1; i < positions.length; i += 1)
    positions[i].at = Math.max(positions[i].at, positions[i - 1].at + LINE_HEIGHT);
  let floor = bottom;
  for (const position of positions.toReversed()) {
    position.at = Math.max(Math.min(position.at, floor), top);
    floor = position.at - LINE_HEIGHT;
  }
  for (const { line, at } of positions) {
    const marker = { d: MARKERS[line.index % MARKERS.length], fill: colourFor(line.index) };
    addElement(svg, "path", { ...marker, transform: `translate(${right + 8} ${at})` });
    const fits = Math.floor((width - right - 18) / 7.2);
    const text = line.label.length > fits ? `${line.label.slice(0, fits - 1)}…` : line.label;
    const label = addElement(
      svg,
      "text",
      { x: right + 16, y: at + 4, "data-label": line.label, ...fontAttributes() },
      text,
    );
    if (text !== line.label) addElement(label, "title", {}, line.label);
  }
}

function colourFor(index) {
  const slot = index % COLOURS.length;
  return `var(--chart-${slot + 1}, ${COLOURS[slot]})`;
}

function inkColour() {
  return "var(--chart-ink, currentColor)";
}

function gridColour() {
  return "var(--chart-grid, #8884)";
}

function fontAttributes() {
  return { fill: inkColour(), "font-size": 12, "font-family": SANS };
}

function addElement(parent, name, attributes, text) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.append(text);
  parent?.append(element);
  return element;
}
