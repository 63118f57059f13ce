// Collects the figures of heads: one row for each layer, head and variant, averaged over calls.

const readOutput = (name) => [name, ({ output }) => output?.[name]];
const readMean = (name) => [name, ({ weights }) => weights?.[name]?.mean];

const READERS = [
  readOutput("relative_error"),
  readOutput("largest_error"),
  readOutput("cosine"),
  readMean("total_variation"),
  readMean("kl_divergence"),
  readMean("js_divergence"),
  readMean("rank_correlation"),
  readMean("entropy"),
  ["baseline_entropy", (_, anchor) => anchor.weights?.entropy?.mean],
];
// of the sequences that have them; a figure that is undefined in one sequence has no mean otherwise
const SKIPPED = ["rank_correlation", "entropy", "baseline_entropy"];

const COLUMNS = [
  "layer",
  "head",
  "variant",
  ...READERS.map(([name]) => name),
  "queries",
  "problem",
];

/** The rows of a comparison. A figure is the mean over sequences, weighted by their queries. */
export class HeadFigures {
  /**
   * @param {Object[]} calls of a captured model
   * @param {string} anchor name of the baseline
   * @param {string[]} variants their names
   */
  constructor(calls, anchor, variants) {
    this.layers = [...new Set(calls.map(({ layer }) => layer))];
    this.heads = [...new Set(calls.flatMap(({ heads }) => heads))].sort((a, b) => a - b);
    this.anchor = anchor;
    this.variants = variants;
    this.sums = new Map();
  }

  /**
   * Adds a response.
   *
   * @param {string} layer
   * @param {{heads: number[], queries: number, result: Object}} compared from `compareCall`
   */
  add(layer, { heads, queries, result: { anchor, variants } }) {
    for (const { variant, heads: found } of variants) {
      heads.forEach((head, at) => {
        const sum = this.sumOf(layer, head, variant);
        sum.queries += queries;
        for (const [name, read] of READERS) {
          const value = read(found[at], anchor.heads[at]) ?? null;
          if (value === null && SKIPPED.includes(name)) continue;
          addTo(sum.figures, name, value ?? NaN, queries);
        }
      });
    }
  }

  /** Adds the reason why a variant was not compared on a call: its heads have no figures then. */
  fail({ layer, heads }, variant, problem) {
    for (const head of heads) this.sumOf(layer, head, variant).problem ??= problem;
  }

  sumOf(layer, head, variant) {
    const key = keyOf(layer, head, variant);
    if (!this.sums.has(key)) this.sums.set(key, { queries: 0, problem: null, figures: {} });
    return this.sums.get(key);
  }

  /** Returns the row of a head; null if no call has it yet. */
  row(layer, head, variant) {
    const sum = this.sums.get(keyOf(layer, head, variant));
    if (!sum) return null;
    const named = READERS.map(([name]) => {
      const { total, weight } = sum.figures[name] ?? { total: NaN, weight: 1 };
      return [name, sum.problem === null ? total / weight : NaN];
    });
    const { queries, problem } = sum;
    return { layer, head, variant, ...Object.fromEntries(named), queries, problem };
  }

  /** Returns the rows that exist so far, in the order of layers, heads and variants. */
  rows() {
    return this.layers.flatMap((layer) =>
      this.heads.flatMap((head) =>
        this.variants.flatMap((variant) => this.row(layer, head, variant) ?? []),
      ),
    );
  }

  /**
   * Returns a figure of all heads: layers × heads, row-major; NaN without a value.
   *
   * @param {string} name of the figure
   * @param {string[]} variants the first with a value counts
   */
  matrix(name, variants) {
    const find = (layer, head) => {
      const values = variants.map((variant) => this.row(layer, head, variant)?.[name] ?? NaN);
      return values.find((value) => !Number.isNaN(value)) ?? NaN;
    };
    const rows = this.layers.map((layer) => this.heads.map((head) => find(layer, head)));
    return Float64Array.from(rows.flat());
  }
}

function addTo(figures, name, value, queries) {
  const { total, weight } = figures[name] ?? { total: 0, weight: 0 };
  if (name === "largest_error") {
    figures[name] = { total: Math.max(total, value), weight: 1 }; // NaN stays NaN
  } else {
    figures[name] = { total: total + queries * value, weight: weight + queries };
  }
}

/** Returns the rows as a table to save, with the columns of `Calls.compare`. */
export function listRows(rows) {
  const cell = (value) => (Number.isNaN(value) ? null : value);
  return { headings: COLUMNS, rows: rows.map((row) => COLUMNS.map((name) => cell(row[name]))) };
}

/** Returns the names of layers without the parts that all of them share, such as "0" and "11". */
export function shortNames(layers) {
  const names = layers.map((layer) => layer || "model");
  if (layers.length < 2) return names.map((name) => name.split(".").slice(-2).join("."));
  const countShared = (lists) => {
    const at = lists[0].findIndex((part, i) => lists.some((list) => list[i] !== part));
    return at < 0 ? lists[0].length : at;
  };
  const parts = names.map((name) => name.split("."));
  const start = countShared(parts);
  const rest = parts.map((list) => list.slice(start));
  const end = countShared(rest.map((list) => list.toReversed()));
  const short = rest.map((list) => list.slice(0, list.length - end).join("."));
  return short.every(Boolean) ? short : names;
}

const keyOf = (layer, head, variant) => JSON.stringify([layer, head, variant]);
