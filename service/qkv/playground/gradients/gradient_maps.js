// Draws the gradients of each input beside its finite differences, with one cursor for both maps.

import { formatNumber, h } from "../dom.js";
import { largestSize } from "../weights/colors.js";
import { Heatmap } from "../weights/heatmap.js";
import { describeUse } from "../weights/heatmap_pointer.js";

const HINT = `${describeUse()} Both numbers of an entry are shown here.`;

const MAX_NARROW_COLS = 6; // such maps have room beside each other

/** The two maps of an input. */
const KINDS = [
  ["gradient", "gradients"],
  ["finite difference", "quotients"],
];

/**
 * Creates the maps.
 *
 * @param {HTMLElement} root
 * @param {(text: string) => void} announce called if the keyboard moved the cursor
 * @returns {{show: (tensors: Array<Object>) => void, repaint: () => void}} `show` takes inputs from
 *   `fetchGradients`, each with `quotients` (NaN: not computed), `names` of rows and columns, `title`
 */
export function createGradientMaps(root, announce) {
  const readout = h("p", { class: "gradient-readout idle" }, HINT);
  const grid = h("div", { class: "gradient-maps" });
  root.append(readout, grid);
  let shown = []; // inputs with their two maps

  const point = (tensor, cell, byKey) => {
    for (const one of shown) {
      for (const map of one.maps) map.markCell(one.name === tensor.name ? cell : null);
    }
    readout.classList.toggle("idle", !cell);
    if (!cell) return readout.replaceChildren(HINT);
    const current = shown.find(({ name }) => name === tensor.name).tensor;
    const at = cell.row * current.cols + cell.col;
    const [place, numbers] = [entryName(current, at), describeEntry(current, at)];
    readout.replaceChildren(`${place}: `, h("strong", {}, numbers));
    if (byKey) announce(`${place}: ${numbers}`);
  };
  const create = ({ name, cols }) => {
    const legend = h("div", {});
    const figures = KINDS.map(([kind]) => {
      const element = h("figure", { class: "map", "aria-label": `${kind} of ${name}` });
      const map = new Heatmap(element, {
        name: `the ${kind} of ${name}`,
        maxHeight: 240,
        isSmall: true,
        onPoint: (cell, byKey) => point({ name }, cell, byKey),
      });
      const title = h("div", { class: "head-title" }, h("span", { class: "hint" }, kind));
      title.append(map.saveMenu);
      return { map, part: h("div", {}, title, element) };
    });
    legend.append(figures[0].map.legend);
    const heading = h("div", { class: "gradient-title" }, h("h3", {}, name), legend);
    const isNarrow = cols <= MAX_NARROW_COLS;
    const kind = isNarrow ? "gradient-pair narrow" : "gradient-pair";
    const pair = h("div", { class: kind }, ...figures.map(({ part }) => part));
    grid.append(h("div", {}, heading, pair));
    return { name, cols, maps: figures.map(({ map }) => map) };
  };
  const show = (tensors) => {
    const sizes = (list) => list.map(({ name, cols }) => [name, cols]).join();
    if (sizes(tensors) !== sizes(shown)) {
      grid.replaceChildren();
      shown = tensors.map(create);
    }
    shown.forEach((one, i) => {
      one.tensor = tensors[i];
      one.maps.forEach((map, kind) => map.show(createMatrix(one.tensor, ...KINDS[kind])));
    });
    readout.classList.add("idle");
    readout.replaceChildren(HINT);
  };
  return { show, repaint: () => shown.flatMap(({ maps }) => maps).forEach((map) => map.repaint()) };
}

/** Names an entry of an input: key, journey, channel 2. */
export function entryName({ name, cols, names }, at) {
  return `${name}, ${names.rowName(Math.floor(at / cols))}, ${names.colName(at % cols)}`;
}

function describeEntry({ gradients, quotients }, at) {
  const gradient = `gradient ${formatNumber(gradients[at])}`;
  if (Number.isNaN(quotients[at])) return gradient;
  const difference = formatNumber(Math.abs(gradients[at] - quotients[at]), 2);
  return `${gradient}, finite difference ${formatNumber(quotients[at])}, apart ${difference}`;
}

/** Returns the decimals that show two digits of the largest number. */
const countDecimals = (largest) =>
  largest > 0 ? Math.min(Math.max(1 - Math.floor(Math.log10(largest)), 1), 5) : 1;

/** Returns the matrix of a heat map; both maps of an input have the same scale. */
function createMatrix(tensor, kind, field) {
  const { name, rows, cols, gradients, quotients, names, title } = tensor;
  const scaleNumbers = [...gradients, ...quotients.filter(Number.isFinite)];
  return {
    rows,
    cols,
    numbers: tensor[field],
    scaleNumbers,
    decimals: countDecimals(largestSize(scaleNumbers)),
    title: `${kind} of ${name}, ${title}`,
    label: `${kind} of ${name}: ${rows} rows by ${cols} channels.`,
    about: null,
    ...names,
    rowAxis: null,
    colAxis: null,
    rowBars: null,
    colBars: null,
  };
}
