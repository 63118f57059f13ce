// The table of a comparison: a line for each variant, a column for each metric.

import { formatCount, formatNumber, formatTime, h } from "../dom.js";
import { createTerm } from "../glossary.js";

const formatFlops = (flops) => formatCount(flops);
const formatBytes = (bytes) => (bytes ? formatCount(bytes, "B") : "–");
const readOutput = (name) => (entry) => entry.output?.[name];
const readWeights = (name) => (entry) => entry.weights?.[name];

// isFirst: shown before the user asks for all columns; isPair: mean and worst row
const COLUMNS = [
  { group: "Output", name: "Relative error", read: readOutput("relative_error"), isFirst: true },
  { group: "Output", name: "Largest error", read: readOutput("largest_error") },
  { group: "Output", name: "Cosine", read: readOutput("cosine"), digits: 4, isFirst: true },
  {
    group: "Weights",
    name: "Total variation",
    read: readWeights("total_variation"),
    isPair: true,
    isFirst: true,
  },
  { group: "Weights", name: "Jensen–Shannon", read: readWeights("js_divergence"), isPair: true },
  { group: "Weights", name: "KL", read: readWeights("kl_divergence"), isPair: true },
  {
    group: "Weights",
    name: "Rank correlation",
    read: readWeights("rank_correlation"),
    isPair: true,
    isFirst: true,
  },
  { group: "Weights", name: "Entropy", read: ({ weights }) => weights?.entropy?.mean },
  {
    group: "Cost",
    name: "Time",
    unit: "ms",
    read: ({ timing }) => timing.median_ms,
    format: formatTime,
    isFirst: true,
  },
  { group: "Cost", name: "Flops", read: ({ flops }) => flops, format: formatFlops },
  {
    group: "Cost",
    name: "Peak memory",
    unit: "bytes",
    read: ({ peak_bytes: bytes }) => bytes,
    format: formatBytes,
  },
];

/**
 * Creates the table.
 *
 * @param {{anchor: Object, variants: Object[]}} result of a comparison
 * @param {boolean} showsAll shows every column, not the first ones alone
 */
export function createMetricsTable({ anchor, variants }, showsAll) {
  const columns = chooseColumns(showsAll);
  const groups = [...new Set(columns.map(({ group }) => group))];
  const width = (group) => columns.filter((column) => column.group === group).length;
  const heading = (name, attributes = {}) => h("th", { scope: "col", ...attributes }, name);
  const groupHeadings = groups.map((group) =>
    heading(group, { scope: "colgroup", colspan: width(group) }),
  );
  const headings = columns.map(({ name }) => heading(createTerm(name)));
  return h(
    "table",
    { class: "numbers sides" },
    h("caption", { class: "unseen" }, `Variants compared with ${anchor.variant}`),
    h(
      "thead",
      {},
      h("tr", {}, h("td", {}), ...groupHeadings),
      h("tr", {}, heading("Variant"), ...headings),
    ),
    h(
      "tbody",
      {},
      createLine(anchor, columns, true),
      ...variants.map((entry) => createLine(entry, columns, false)),
    ),
  );
}

const chooseColumns = (isAll) => (isAll ? COLUMNS : COLUMNS.filter(({ isFirst }) => isFirst));

function createLine(entry, columns, isAnchor) {
  const note = isAnchor ? h("span", { class: "hint" }, " baseline") : "";
  const cells = columns.map(({ read, digits = 3, format = formatNumber, isPair }) => {
    const value = read(entry);
    if (!isPair || !value) return h("td", {}, format(value ?? null, digits));
    const worst = h("span", { class: "hint" }, format(value.worst, digits));
    return h("td", {}, format(value.mean, digits), worst);
  });
  const name = h("th", { scope: "row" }, entry.variant, note);
  return h("tr", { class: isAnchor ? "anchor" : "" }, name, ...cells);
}

/**
 * Returns the metrics as a table to save.
 *
 * @param {{anchor: Object, variants: Object[]}} result of a comparison
 * @param {boolean} hasAll has every column, not the first ones alone
 */
export function listMetrics({ anchor, variants }, hasAll) {
  const columns = chooseColumns(hasAll);
  const named = columns.flatMap(({ name, unit, isPair, read }) => {
    if (!isPair) return [[unit ? `${name}, ${unit}` : name, read]];
    return ["mean", "worst"].map((part) => [`${name}, ${part}`, (entry) => read(entry)?.[part]]);
  });
  const toRow = (entry) => [entry.variant, ...named.map(([, read]) => read(entry) ?? null)];
  return {
    headings: ["variant", ...named.map(([name]) => name)],
    rows: [anchor, ...variants].map(toRow),
  };
}
