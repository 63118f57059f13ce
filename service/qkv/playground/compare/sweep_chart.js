// Draws a sweep as a line chart: time by length, both axes logarithmic.
//
// Colours are CSS variables with defaults: --chart-1 to --chart-8 for the variants. Each variant also
// has a marker of its own.

import {
  addElement,
  computeScales,
  drawAxes,
  drawGuides,
  fontAttributes,
  inkColour,
} from "./sweep_axes.js";
import { describeCrossover, describeSweep, formatCell, formatInteger } from "./sweep_table.js";

export { createChart } from "./sweep_axes.js";
export { fillSweepTable } from "./sweep_table.js";

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
  drawGuides(svg, scales);
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
