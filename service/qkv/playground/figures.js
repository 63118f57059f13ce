// A sweep in words and as a table, for who cannot see the chart, or would rather read.

const MOST_SAID = 3; // crossovers in a sentence

/**
 * A sweep as a table: a row for each length, a column for each variant.
 *
 * @param {HTMLTableElement} table
 * @param {{cells: Object[], variants: string[]}} sweep
 */
export function fillTable(table, { cells, variants }) {
  const row = (texts, scopes) => {
    const made = document.createElement("tr");
    const entries = texts.map((text, column) => {
      const cell = document.createElement(scopes(column) ? "th" : "td");
      if (scopes(column)) cell.scope = scopes(column);
      cell.textContent = text;
      return cell;
    });
    made.append(...entries);
    return made;
  };
  const lengths = [...new Set(cells.map((cell) => cell.length))].sort((a, b) => a - b);
  const caption = document.createElement("caption");
  caption.textContent = "Median time of a call in milliseconds, and from the least to the most";
  const rows = lengths.map((length) => {
    const found = variants.map((_, index) =>
      cells.find((c) => c.index === index && c.length === length),
    );
    return row([whole(length), ...found.map(cellText)], (column) => (column ? null : "row"));
  });
  table.replaceChildren(
    caption,
    row(["length", ...variants], () => "col"),
    ...rows,
  );
}

/** A number of milliseconds in three digits. */
export function milliseconds(ms) {
  return ms.toLocaleString("en", { maximumSignificantDigits: 3 });
}

/** What a cell says: its milliseconds, or why there are none. */
export function cellText(cell) {
  if (!cell) return "";
  if (cell.problem) return cell.problem.detail ?? cell.problem.title;
  const [median, least, most] = [cell.median_ms, cell.least_ms, cell.most_ms].map(milliseconds);
  return `${median} (${least} to ${most})`;
}

/** A whole number, with commas. */
export function whole(number) {
  return Math.round(number).toLocaleString("en");
}

/** A sweep in a few sentences. */
export function described(cells, variants, crossovers) {
  const parts = variants.flatMap((label, index) => {
    const points = cells.filter((c) => c.index === index).sort((a, b) => a.length - b.length);
    if (!points.length) return [];
    const said = [points[0], points.at(-1)].map(
      (c) => `${milliseconds(c.median_ms)} ms at ${whole(c.length)}`,
    );
    return [`${label}: ${[...new Set(said)].join(", ")}.`];
  });
  const crossed = crossovers.map((crossover) => `${equalAt(crossover, variants)}.`);
  return [...parts, ...crossed].join(" ") || "Nothing has been measured yet.";
}

/** What a crossover says: before it the one was faster. */
export function equalAt({ from, to, length }, variants) {
  return `${variants[to]} is faster than ${variants[from]} from about ${whole(length)} on`;
}

/**
 * Who is faster, in a sentence or two: at every length, or from where on.
 *
 * @param {{cells: Object[], variants: string[], crossovers: Object[], lengths: number[]}} sweep
 */
export function whoIsFaster({ cells, variants, crossovers, lengths }) {
  const said = crossovers.slice(0, MOST_SAID).map((crossover) => equalAt(crossover, variants));
  const rest = crossovers.length - said.length;
  const crossed = said.length
    ? `${said.join("; ")}${rest ? `, and ${rest} more, marked in the chart` : ""}.`
    : "";
  const first = variants.findIndex((_, index) =>
    lengths.every((length) => isFastest(cells, index, length)),
  );
  if (first < 0 || variants.length < 2) return crossed || "No two lines cross.";
  const than = variants.length > 2 ? "the fastest" : `faster than ${variants[1 - first]}`;
  return `${variants[first]} is ${than} at every length measured. ${crossed}`.trim();
}

function isFastest(cells, index, length) {
  const here = cells.filter((cell) => cell.length === length && cell.median_ms !== undefined);
  const own = here.find((cell) => cell.index === index);
  return Boolean(own) && here.every((c) => c === own || c.median_ms > own.median_ms);
}
