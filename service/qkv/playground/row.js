// One query's weights: which keys have most of them, and how much together.

import { fixed, h, number } from "./dom.js";

const SHOWN = 8;

/**
 * The panel of a row.
 *
 * @param {HTMLElement} root
 * @param {(row: number) => void} chosen told of a row that was typed, or released: null
 */
export function rowPanel(root, chosen) {
  const title = h("h3", {});
  const input = h("input", {
    id: "row-number",
    type: "number",
    min: 0,
    step: 1,
    change: () => input.value !== "" && chosen(clamp(Number(input.value), Number(input.max))),
  });
  const hold = h("button", { type: "button", class: "quiet hold" });
  const facts = h("dl", { class: "facts" });
  const body = h("tbody");
  const about = h("p", { class: "hint" });
  const table = h(
    "table",
    { class: "most" },
    h("caption", { class: "unseen" }, "The keys with most weight"),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col" }, "Key"),
        h("th", { scope: "col", class: "end" }, "Weight"),
        h("th", { scope: "col", class: "end" }, "Together"),
      ),
    ),
    body,
  );
  root.append(
    h("div", { class: "title" }, title, hold),
    h("div", { class: "field inline" }, h("label", { for: "row-number" }, "Query"), input),
    facts,
    table,
    about,
  );

  /**
   * Shows a row.
   *
   * @param {Object} shown
   *   row, rows: which, of how many; isHeld
   *   weights: of every key; names: (index) => text of rows and columns
   *   entropy, effective: of the row, or undefined; isSigned
   */
  return ({ row, rows, isHeld, weights, rowName, colName, entropy, effective, isSigned }) => {
    title.textContent = rowName(row);
    hold.textContent = isHeld ? "Let go" : "Hold";
    hold.onclick = () => chosen(isHeld ? null : row);
    hold.setAttribute("aria-label", isHeld ? "Let go of this row" : "Hold this row");
    input.max = rows - 1;
    if (document.activeElement !== input) input.value = row;
    facts.replaceChildren(
      ...fact("Entropy", entropy === undefined ? "–" : `${number(entropy, 3)} nats`),
      ...fact("Effective keys", effective === undefined ? "–" : number(effective, 3)),
    );
    const order = ordered(weights);
    const total = order.reduce((sum, { size }) => sum + size, 0);
    const largest = order[0]?.size || 1;
    let sum = 0;
    const lines = order.slice(0, SHOWN).filter(({ size }) => size > 0);
    body.replaceChildren(
      ...lines.map(({ col, weight, size }) => {
        sum += size;
        const bar = h("span", { class: weight < 0 ? "bar below" : "bar", "aria-hidden": "true" });
        bar.style.width = `${(100 * size) / largest}%`;
        return h(
          "tr",
          {},
          h("th", { scope: "row" }, h("span", {}, colName(col)), bar),
          h("td", {}, largest < 0.01 ? number(weight, 3) : fixed(weight)),
          h("td", {}, total ? percent(sum / total) : "–"),
        );
      }),
    );
    about.textContent = spread(order, total, isSigned);
  };
}

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

const fact = (name, value) => [h("div", {}, h("dt", {}, name), h("dd", {}, value))];

const clamp = (value, most) => Math.min(Math.max(Math.round(value) || 0, 0), most);

/** Every key by the size of its weight. */
function ordered(weights) {
  const list = Array.from(weights, (weight, col) => ({ col, weight, size: Math.abs(weight) }));
  return list.sort((a, b) => b.size - a.size || a.col - b.col);
}

/** Over how many keys half of the mass is spread, and nearly all of it. */
function spread(order, total, isSigned) {
  if (!total) return "This query sees nothing.";
  const needed = (share) => {
    let [sum, keys] = [0, 0];
    for (; keys < order.length && sum < share * total * (1 - 1e-9); keys += 1)
      sum += order[keys].size;
    return `${keys} ${keys === 1 ? "key" : "keys"}`;
  };
  const mass = isSigned ? "mass, whatever its sign," : "mass";
  return `Half of the ${mass} is on ${needed(0.5)}, 90 % on ${needed(0.9)} of ${order.length}.`;
}
