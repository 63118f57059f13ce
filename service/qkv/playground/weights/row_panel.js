// Shows the weights of one query: the keys with the largest weights by size, and their cumulative
// share.

import { formatFixed, formatNumber, h } from "../dom.js";
import { createTerm } from "../glossary.js";
import { createSaveMenu } from "../keep/save_menu.js";

const SHOWN_COUNT = 8;

/**
 * Creates the panel.
 *
 * @param {HTMLElement} root
 * @param {(row: number|null) => void} onSelect called with a row to pin, or null to unpin
 */
export function createRowPanel(root, onSelect) {
  const title = h("h3", {});
  const input = h("input", {
    id: "row-number",
    type: "number",
    min: 0,
    step: 1,
    change: () => input.value !== "" && onSelect(clamp(Number(input.value), Number(input.max))),
  });
  const selectButton = h("button", { type: "button", class: "quiet select-row" });
  const facts = h("dl", { class: "facts" });
  const body = h("tbody");
  const about = h("p", { class: "hint" });
  const table = h(
    "table",
    { class: "most" },
    h("caption", { class: "unseen" }, "The keys with the largest weights by size"),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col" }, "Key"),
        h("th", { scope: "col", class: "end" }, "Weight"),
        h("th", { scope: "col", class: "end" }, createTerm("Cumulative")),
      ),
    ),
    body,
  );
  let shown = null; // the values of the row
  const saveMenu = createSaveMenu("the row", () => ({
    title: shown.title,
    table: listKeys(shown),
    shownTable: listKeys(shown, SHOWN_COUNT),
  }));
  root.append(
    h("div", { class: "title" }, title, saveMenu, selectButton),
    h("div", { class: "field inline" }, h("label", { for: "row-number" }, "Query"), input),
    facts,
    table,
    about,
  );

  /**
   * Shows a row.
   *
   * @param {Object} values
   *   row: index; rows: their number; isSelected: the row is pinned; title: of the saved table
   *   weights: one for each key; rowName, colName: (index) => text
   *   entropy, effectiveKeys: of the row, or undefined; isSigned: weights can be negative
   */
  return (values) => {
    shown = values;
    const { row, rows, isSelected, weights, rowName, colName, entropy, effectiveKeys } = values;
    title.textContent = rowName(row);
    selectButton.textContent = isSelected ? "Unpin" : "Pin";
    selectButton.onclick = () => onSelect(isSelected ? null : row);
    selectButton.setAttribute("aria-label", isSelected ? "Unpin this row" : "Pin this row");
    input.max = rows - 1;
    if (document.activeElement !== input) input.value = row;
    const nanCount = weights.filter(Number.isNaN).length;
    const formatFact = (value, unit = "") =>
      nanCount || value === undefined ? "–" : `${formatNumber(value, 3)}${unit}`;
    table.classList.toggle("signed", values.isSigned);
    facts.hidden = values.isSigned;
    facts.replaceChildren(
      createFact("Entropy", formatFact(entropy, " nats")),
      createFact("Effective keys", formatFact(effectiveKeys)),
    );
    table.hidden = nanCount > 0;
    if (nanCount) {
      about.textContent = describeNaN(nanCount, weights.length);
      return;
    }
    const sorted = sortByWeight(weights);
    const total = sorted.reduce((sum, { size }) => sum + size, 0);
    const largest = sorted[0]?.size || 1;
    let sum = 0;
    const lines = sorted.slice(0, SHOWN_COUNT).filter(({ size }) => size > 0);
    body.replaceChildren(
      ...lines.map(({ col, weight, size }) => {
        sum += size;
        const bar = h("span", { class: weight < 0 ? "bar below" : "bar", "aria-hidden": "true" });
        bar.style.width = `${(100 * size) / largest}%`;
        return h(
          "tr",
          {},
          h("th", { scope: "row" }, h("span", {}, colName(col)), bar),
          h("td", {}, largest < 0.01 ? formatNumber(weight, 3) : formatFixed(weight)),
          h("td", {}, total ? formatPercent(sum / total) : "–"),
        );
      }),
    );
    about.textContent = describeSpread(sorted, total, values.isSigned);
  };
}

const formatPercent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

const createFact = (name, value) => h("div", {}, h("dt", {}, createTerm(name)), h("dd", {}, value));

const clamp = (value, max) => Math.min(Math.max(Math.round(value) || 0, 0), max);

/** Returns the keys of a row as a table to save, the largest weights first. Signed ones have no share. */
function listKeys({ weights, colName, isSigned }, count = weights.length) {
  const sorted = sortByWeight(weights);
  const total = sorted.reduce((sum, { size }) => sum + size, 0);
  let sum = 0;
  const rows = sorted.slice(0, count).map(({ col, weight, size }) => {
    sum += size;
    return [colName(col), weight, ...(isSigned ? [] : [total ? sum / total : null])];
  });
  return { headings: ["key", "weight", ...(isSigned ? [] : ["cumulative share"])], rows };
}

/** Sorts the keys by the size of their weights. */
function sortByWeight(weights) {
  const list = Array.from(weights, (weight, col) => ({ col, weight, size: Math.abs(weight) }));
  return list.sort((a, b) => b.size - a.size || a.col - b.col);
}

/** Describes a row with NaN, which has neither an order of keys nor an entropy. */
function describeNaN(count, keys) {
  const amount = count === keys ? "All weights" : `${count} of the ${keys} weights`;
  return (
    `${amount} of this row are NaN. The cause is a NaN or an infinity in its query, in a key that ` +
    "it sees, or in its mask."
  );
}

/** Describes how many keys have half of the mass, and how many have 90 %. */
function describeSpread(sorted, total, isSigned) {
  if (!total) return "This query sees no key.";
  const keysFor = (share) => {
    let [sum, keys] = [0, 0];
    for (; keys < sorted.length && sum < share * total * (1 - 1e-9); keys += 1)
      sum += sorted[keys].size;
    return `${keys} ${keys === 1 ? "key" : "keys"}`;
  };
  const mass = isSigned ? "absolute mass" : "mass";
  return `Half of the ${mass} is on ${keysFor(0.5)}, 90 % on ${keysFor(0.9)} of ${sorted.length}.`;
}
