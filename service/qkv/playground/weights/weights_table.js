// Shows the weights as a table, for screen readers and for exact numbers.

import { findById, formatFixed, formatNumber, h } from "../dom.js";

const MAX_COLUMNS = 24;
const MAX_ROWS = 256;

/**
 * Shows the table while it is open: all weights if there are few columns, otherwise the largest of
 * each row.
 *
 * @param {Object|null} matrix of the heat map, with its bars; null: the table is empty
 */
export function showWeightsTable(matrix) {
  const details = findById("table");
  const root = details.lastElementChild;
  details.ontoggle = () => {
    if (details.open && matrix) fillTable(root, matrix);
  };
  if (!matrix) root.replaceChildren();
  details.ontoggle();
}

function fillTable(root, matrix) {
  const { rows, cols, numbers, rowName, colName, rowBars } = matrix;
  const isMasked = (row, col) => matrix.masked?.[row * cols + col];
  const showsAll = cols <= MAX_COLUMNS;
  const columns = Array.from({ length: cols }, (_, col) => col);
  const headings = showsAll ? columns.map(colName) : ["Largest at", "Largest weight"];
  if (rowBars) headings.push("Entropy");
  const body = Array.from({ length: Math.min(rows, MAX_ROWS) }, (_, row) => {
    const weights = numbers.subarray(row * cols, (row + 1) * cols);
    const cells = showsAll
      ? [...weights].map((value, col) => (isMasked(row, col) ? "masked" : formatFixed(value)))
      : describeLargest(weights, colName);
    if (rowBars) cells.push(formatNumber(rowBars.values[row], 3));
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, rowName(row)),
      ...cells.map((text) => h("td", {}, text)),
    );
  });
  const table = h(
    "table",
    { class: "numbers" },
    h("caption", { class: "unseen" }, matrix.label),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col" }, "Query"),
        ...headings.map((text) => h("th", { scope: "col" }, text)),
      ),
    ),
    h("tbody", {}, ...body),
  );
  root.replaceChildren(table);
}

/** Returns key and weight of the largest of the keys that the row sees: their weights are not 0. */
function describeLargest(weights, colName) {
  const isLarger = (value, at) => value !== 0 && (at === null || value > weights[at]);
  const at = weights.reduce((best, value, col) => (isLarger(value, best) ? col : best), null);
  return at === null ? ["–", "–"] : [colName(at), formatFixed(weights[at])];
}
