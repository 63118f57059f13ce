// The weights as a table, for who hears the page, or wants the numbers.

import { fixed, h, number } from "./dom.js";

const MOST_COLUMNS = 24;
const MOST_ROWS = 256;

/**
 * A table of a matrix: every weight where there are few columns, or else the largest of each row.
 *
 * @param {HTMLElement} root
 * @param {Object} shown what the heat map shows, with its bars
 */
export function fillWeights(root, shown) {
  const { rows, cols, numbers, rowName, colName, rowBars } = shown;
  const isWhole = cols <= MOST_COLUMNS;
  const columns = Array.from({ length: cols }, (_, col) => col);
  const heads = isWhole ? columns.map(colName) : ["Largest at", "Largest weight"];
  if (rowBars) heads.push("Entropy");
  const body = Array.from({ length: Math.min(rows, MOST_ROWS) }, (_, row) => {
    const line = numbers.subarray(row * cols, (row + 1) * cols);
    const best = line.reduce(
      (at, value, col) => (Math.abs(value) > Math.abs(line[at]) ? col : at),
      0,
    );
    const cells = isWhole
      ? [...line].map((value) => fixed(value))
      : [colName(best), fixed(line[best])];
    if (rowBars) cells.push(number(rowBars.values[row], 3));
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
    h("caption", { class: "unseen" }, shown.label),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col" }, "Query"),
        ...heads.map((text) => h("th", { scope: "col" }, text)),
      ),
    ),
    h("tbody", {}, ...body),
  );
  root.replaceChildren(table);
}
