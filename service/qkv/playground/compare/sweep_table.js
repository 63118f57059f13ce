// Describes a sweep in sentences and as a table, for users who do not see the chart.

const NO_CROSSOVER = "No two lines cross outside the range of their repeats.";
const MAX_CROSSOVERS = 3; // crossovers in a sentence

/**
 * Fills the table: a row for each length, a column for each variant.
 *
 * @param {HTMLTableElement} table
 * @param {{cells: Object[], variants: string[]}} sweep
 */
export function fillSweepTable(table, { cells, variants }) {
  const createRow = (texts, scopeOf) => {
    const line = document.createElement("tr");
    const entries = texts.map((text, column) => {
      const cell = document.createElement(scopeOf(column) ? "th" : "td");
      if (scopeOf(column)) cell.scope = scopeOf(column);
      cell.textContent = text;
      return cell;
    });
    line.append(...entries);
    return line;
  };
  const lengths = [...new Set(cells.map((cell) => cell.length))].sort((a, b) => a - b);
  const caption = document.createElement("caption");
  caption.textContent = "Median time per call in milliseconds (minimum to maximum)";
  const rows = lengths.map((length) => {
    const found = variants.map((_, index) =>
      cells.find((c) => c.index === index && c.length === length),
    );
    return createRow([formatInteger(length), ...found.map(formatCell)], (column) =>
      column ? null : "row",
    );
  });
  table.replaceChildren(
    caption,
    createRow(["length", ...variants], () => "col"),
    ...rows,
  );
}

/** Lists the cells as a table to save: a row for each variant and length. */
export function listCells({ cells, variants }) {
  const headings = ["variant", "length", "median_ms", "least_ms", "most_ms", "problem"];
  const sorted = cells.toSorted((a, b) => a.index - b.index || a.length - b.length);
  const rows = sorted.map(({ index, length, median_ms: median, least_ms, most_ms, problem }) => [
    variants[index],
    length,
    median ?? null,
    least_ms ?? null,
    most_ms ?? null,
    problem ? (problem.detail ?? problem.title) : null,
  ]);
  return { headings, rows };
}

/** Formats milliseconds with three digits. */
export function formatMilliseconds(ms) {
  return ms.toLocaleString("en", { maximumSignificantDigits: 3 });
}

/** Formats a cell: its milliseconds, or its problem. */
export function formatCell(cell) {
  if (!cell) return "";
  if (cell.problem) return cell.problem.detail ?? cell.problem.title;
  const [median, least, most] = [cell.median_ms, cell.least_ms, cell.most_ms].map(
    formatMilliseconds,
  );
  const held = cell.held_bytes ? `, keeps ${formatInteger(cell.held_bytes)} bytes` : "";
  return `${median} (${least} to ${most})${held}`;
}

/** Formats a whole number with commas. */
export function formatInteger(number) {
  return Math.round(number).toLocaleString("en");
}

/** Describes a sweep in a few sentences. */
export function describeSweep(cells, variants, crossovers) {
  const parts = variants.flatMap((label, index) => {
    const points = cells.filter((c) => c.index === index).sort((a, b) => a.length - b.length);
    if (!points.length) return [];
    const sentences = [points[0], points.at(-1)].map(
      (c) => `${formatMilliseconds(c.median_ms)} ms at ${formatInteger(c.length)}`,
    );
    return [`${label}: ${[...new Set(sentences)].join(", ")}.`];
  });
  const crossings = crossovers.map((crossover) => `${describeCrossover(crossover, variants)}.`);
  return [...parts, ...crossings].join(" ") || "Nothing has been measured yet.";
}

/** Describes a crossover: the measured lengths between which `to` becomes faster than `from`. */
export function describeCrossover({ from, to, between }, variants) {
  const [first, second] = between.map(formatInteger);
  return `${variants[to]} becomes faster than ${variants[from]} between ${first} and ${second}`;
}

/**
 * Describes the fastest variant: at every length, or from which length on.
 *
 * @param {{cells: Object[], variants: string[], crossovers: Object[], lengths: number[]}} sweep
 */
export function describeFastest({ cells, variants, crossovers, lengths }) {
  const sentences = crossovers
    .slice(0, MAX_CROSSOVERS)
    .map((crossover) => describeCrossover(crossover, variants));
  const rest = crossovers.length - sentences.length;
  const crossings = sentences.length
    ? `${sentences.join("; ")}${rest ? `, and ${rest} more, marked in the chart` : ""}.`
    : "";
  const first = variants.findIndex((_, index) =>
    lengths.every((length) => isFastest(cells, index, length)),
  );
  if (first < 0 || variants.length < 2) return crossings || NO_CROSSOVER;
  const comparison = variants.length > 2 ? "the fastest" : `faster than ${variants[1 - first]}`;
  return `${variants[first]} is ${comparison} at every length measured. ${crossings}`.trim();
}

function isFastest(cells, index, length) {
  const cellsAtLength = cells.filter(
    (cell) => cell.length === length && cell.median_ms !== undefined,
  );
  const ownCell = cellsAtLength.find((cell) => cell.index === index);
  return (
    Boolean(ownCell) && cellsAtLength.every((c) => c === ownCell || c.median_ms > ownCell.median_ms)
  );
}
