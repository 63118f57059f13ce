// Draws a figure of all heads as heat maps of layers by heads, one for each variant, with one scale
// and one cursor.

import { formatNumber, h } from "../dom.js";
import { createTerm } from "../glossary.js";
import { Heatmap } from "../weights/heatmap.js";
import { describeUse } from "../weights/heatmap_pointer.js";
import { shortNames } from "./head_figures.js";

/** The figures that can be drawn. `anchor`: the same figure of softmax. */
export const FIGURES = [
  {
    name: "relative_error",
    term: "Relative error",
    about: "0: the head has the output of softmax.",
  },
  {
    name: "total_variation",
    term: "Total variation",
    about: "0: the head has the weights of softmax. 1: no key in common.",
  },
  {
    name: "js_divergence",
    term: "Jensen–Shannon",
    about: "0: the head has the weights of softmax. ln 2 = 0.693: no key in common.",
  },
  {
    name: "rank_correlation",
    term: "Rank correlation",
    about: "1: the head has softmax's order of keys. −1: the reverse.",
    isLargestClosest: true,
  },
  {
    name: "entropy",
    term: "Entropy",
    about: "0: one key has all the weight. ln S: all S keys have the same.",
    anchor: "baseline_entropy",
  },
];

const EFFECT = "load the head below";

/**
 * Creates the maps.
 *
 * @param {Object} callbacks
 * @param {(layer: string, head: number) => void} callbacks.onHead called with the chosen head
 * @param {(text: string) => void} callbacks.announce
 * @returns {{scale: Node, area: Node, start: Function, show: Function, repaint: Function}}
 */
export function createHeadMaps({ onHead, announce }) {
  const readout = h("p", { class: "readout head-readout idle" }, describeUse(EFFECT));
  const legend = h("div", { class: "shades" });
  const about = h("p", { class: "hint" });
  const grid = h("div", { class: "head-maps" });
  let figures = null; // HeadFigures
  let figure = FIGURES[0];
  let maps = []; // {variant, name, map, mean}

  const createMap = (variant, name) => {
    const title = h("h3", {}, variant);
    const mean = h("span", { class: "hint" });
    const element = h("figure", { class: "map", "aria-label": `Map of ${variant}` });
    const heading = h("div", { class: "head-title" }, title, mean);
    grid.append(h("div", {}, heading, element));
    const map = new Heatmap(element, {
      name: `the map of ${variant}`,
      maxHeight: 520,
      isSmall: true,
      effect: EFFECT,
      onPoint: (cell, byKey) => point(variant, cell, byKey),
      onSelect: (_, cell) => cell && onHead(figures.layers[cell.row], figures.heads[cell.col]),
    });
    heading.append(map.saveMenu);
    maps.push({ variant, name, map, mean });
  };

  /** Makes maps for the variants of a comparison that starts. */
  const start = (newFigures) => {
    figures = newFigures;
    show(figure);
  };

  /** Draws a figure of all heads that are compared so far. */
  const show = (newFigure = figure) => {
    figure = newFigure;
    const wanted = figures.variants.map((variant) => [variant, figure.name]);
    if (figure.anchor) wanted.unshift([figures.anchor, figure.anchor]);
    if (wanted.join() !== maps.map(({ variant, name }) => [variant, name]).join()) {
      grid.replaceChildren();
      maps = [];
      for (const [variant, name] of wanted) createMap(variant, name);
      legend.replaceChildren(maps[0].map.legend);
    }
    about.replaceChildren(createTerm(figure.term), `. ${figure.about}`);
    const numbers = maps.map(({ variant, name }) =>
      figures.matrix(name, name === figure.anchor ? figures.variants : [variant]),
    );
    const all = numbers.flatMap((list) => [...list]);
    maps.forEach(({ variant, map, mean }, i) => {
      map.show(createMatrix(figures, figure, variant, numbers[i], all));
      const known = numbers[i].filter(Number.isFinite);
      const sum = known.reduce((total, value) => total + value, 0);
      mean.textContent = known.length ? `mean ${formatNumber(sum / known.length, 3)}` : "undefined";
    });
    point(null, null, false);
  };

  /** Shows the figures of the head at the cursor of a map, and marks it in all maps. */
  const point = (variant, cell, byKey) => {
    for (const one of maps) if (one.variant !== variant) one.map.markCell(cell);
    readout.classList.toggle("idle", !cell);
    if (!cell) return readout.replaceChildren(describeUse(EFFECT));
    const [layer, head] = [figures.layers[cell.row], figures.heads[cell.col]];
    const values = maps.map(({ variant: shown, map }) => {
      const value = map.matrix.numbers[cell.row * map.matrix.cols + cell.col];
      const problem = figures.row(layer, head, shown)?.problem;
      const text = Number.isNaN(value) ? "undefined" : formatNumber(value, 3);
      return { shown, text: `${shown} ${problem ? "left out" : text}` };
    });
    const parts = values.flatMap(({ shown, text }, i) => [
      i ? ", " : "",
      shown === variant ? h("strong", {}, text) : text,
    ]);
    const place = `${layer || "model"}, head ${head}`;
    readout.replaceChildren(`${place}: `, ...parts);
    if (byKey) announce(`${place}, ${values.find(({ shown }) => shown === variant).text}`);
  };

  return {
    scale: h("div", { class: "head-scale" }, legend, about),
    area: h("div", {}, readout, grid),
    start,
    show,
    repaint: () => maps.forEach(({ map }) => map.repaint()),
    figure: () => figure,
  };
}

/** Returns the matrix of a heat map. */
function createMatrix({ layers, heads }, { term }, variant, numbers, scaleNumbers) {
  const names = shortNames(layers);
  return {
    rows: layers.length,
    cols: heads.length,
    numbers,
    scaleNumbers,
    title: `${term} of ${variant}`,
    label: `${term} of ${variant}: ${layers.length} layers by ${heads.length} heads.`,
    about: null,
    rowLabels: names,
    colLabels: heads.map(String),
    rowTick: (row) => names[row],
    colTick: (col) => String(heads[col]),
    rowName: (row) => layers[row],
    colName: (col) => `head ${heads[col]}`,
    rowAxis: "layer",
    colAxis: "head",
    rowBars: null,
    colBars: null,
  };
}

/** Creates the selector of the figure. */
export function createFigureField(onChange) {
  const select = h(
    "select",
    { id: "head-figure", change: () => onChange(FIGURES[select.selectedIndex]) },
    ...FIGURES.map(({ term, name }) => new Option(term, name)),
  );
  const label = h("label", { for: "head-figure" }, "Figure");
  return h("div", { class: "field inline" }, label, select);
}
