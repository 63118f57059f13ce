// Shows the rows of a comparison as a list that can be sorted, and a figure of all heads as tables.

import { formatFixed, h } from "../dom.js";
import { FIGURES } from "./head_maps.js";
import { shortNames } from "./head_figures.js";

const FIRST_ROWS = 20; // before the user asks for all
const LARGEST_CLOSEST = FIGURES.filter((one) => one.isLargestClosest).map(({ name }) => name);
const COLUMNS = [
  ["layer", "Layer"],
  ["head", "Head"],
  ["variant", "Variant"],
  ...FIGURES.map(({ name, term }) => [name, term]),
  ["queries", "Queries"],
];

/**
 * Creates the list of heads.
 *
 * @param {(layer: string, head: number) => void} onHead called with the chosen head
 * @returns {{parts: Node[], show: (figures: Object) => void, sortBy: (name: string) => void}}
 */
export function createHeadList(onHead) {
  const body = h("tbody", {});
  const headings = COLUMNS.map(([name, title]) =>
    h("th", { scope: "col" }, h("button", { type: "button", click: () => sort(name) }, title)),
  );
  const table = h(
    "table",
    { class: "numbers sortable" },
    h("caption", { class: "unseen" }, "Heads, the ones closest to softmax first"),
    h("thead", {}, h("tr", {}, ...headings)),
    body,
  );
  const more = h("button", { type: "button", hidden: true, click: () => showAll() });
  const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": "List of heads" };
  let figures = null;
  let order = { name: FIGURES[0].name, isUp: true };
  let limit = FIRST_ROWS;

  const sort = (name) => {
    const isUp = name === order.name ? !order.isUp : !LARGEST_CLOSEST.includes(name);
    order = { name, isUp };
    draw();
  };
  const showAll = () => {
    limit = Infinity;
    draw();
    body.rows[FIRST_ROWS]?.querySelector("button").focus(); // the button that had the focus is gone
  };
  const draw = () => {
    const rows = figures.rows().filter(({ problem }) => problem === null);
    const names = new Map(
      figures.layers.map((layer, i) => [layer, [i, shortNames(figures.layers)[i]]]),
    );
    const sorted = sortRows(rows, order, (layer) => names.get(layer)[0]);
    headings.forEach((heading, i) => {
      if (COLUMNS[i][0] !== order.name) return heading.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", order.isUp ? "ascending" : "descending");
    });
    body.replaceChildren(
      ...sorted.slice(0, limit).map((row) => createRow(row, names.get(row.layer)[1], onHead)),
    );
    more.hidden = rows.length <= limit;
    more.textContent = `Show all ${rows.length.toLocaleString("en")} rows`;
  };

  return {
    parts: [h("div", region, table), more],
    show: (newFigures) => {
      if (newFigures !== figures) limit = FIRST_ROWS;
      figures = newFigures;
      draw();
    },
    sortBy: (name) => {
      order = { name, isUp: !LARGEST_CLOSEST.includes(name) };
      if (figures) draw();
    },
  };
}

const formatFigure = (value) => (Number.isNaN(value) ? "–" : formatFixed(value));

/** Returns the rows in an order; rows without a value are last in both directions. */
function sortRows(rows, { name, isUp }, indexOf) {
  const valueOf = (row) => (name === "layer" ? indexOf(row.layer) : row[name]);
  const compare = (a, b) => {
    const [x, y] = [valueOf(a), valueOf(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
    const sign = x < y ? -1 : Number(x > y);
    return isUp ? sign : -sign;
  };
  return rows.toSorted(compare);
}

function createRow(row, name, onHead) {
  const label = `Load ${row.layer || "model"}, head ${row.head}`;
  const click = () => onHead(row.layer, row.head);
  const link = { type: "button", class: "link", title: row.layer, "aria-label": label, click };
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, h("button", link, name)),
    h("td", {}, String(row.head)),
    h("td", {}, row.variant),
    ...FIGURES.map((figure) => h("td", {}, formatFigure(row[figure.name]))),
    h("td", {}, row.queries.toLocaleString("en")),
  );
}

/**
 * Returns a table for each map: a row for each layer, a column for each head.
 *
 * @param {Object} figures
 * @param {Object} figure one of `FIGURES`
 */
export function createMapTables(figures, figure) {
  const { layers, heads, variants, anchor } = figures;
  const wanted = variants.map((variant) => [variant, figure.name, [variant]]);
  if (figure.anchor) wanted.unshift([anchor, figure.anchor, variants]);
  return wanted.map(([variant, name, owners]) => {
    const numbers = figures.matrix(name, owners);
    const rows = layers.map((layer, at) => {
      const values = numbers.subarray(at * heads.length, (at + 1) * heads.length);
      const cells = [...values].map((value) => h("td", {}, formatFigure(value)));
      return h("tr", {}, h("th", { scope: "row" }, layer || "model"), ...cells);
    });
    const headings = heads.map((head) => h("th", { scope: "col" }, `head ${head}`));
    return h(
      "table",
      { class: "numbers" },
      h("caption", {}, `${figure.term} of ${variant}`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Layer"), ...headings)),
      h("tbody", {}, ...rows),
    );
  });
}
