// What the heat maps are given: a view's matrices, with names and bars.

import { headName } from "./heads.js";
import { binned, firstOf } from "./view.js";

/** What rows and columns of a view's weights are called, in the map and in full. */
export function namesOf(view, labels) {
  const { ask, weights } = view;
  const axis = (length, bins, one, many) => {
    const words = labels.length === length ? labels : null;
    const often = new Set(words?.filter((word, i) => words.indexOf(word) !== i));
    const full = (i) => {
      if (!words) return `${one} ${i}`;
      return often.has(words[i]) ? `${words[i]} (${i})` : words[i];
    };
    const isPooled = bins < length;
    const range = (bin) =>
      `${many} ${firstOf(bin, bins, length)} to ${firstOf(bin + 1, bins, length) - 1}`;
    return {
      labels: isPooled ? null : words,
      tick: (i) => String(firstOf(i, bins, length)),
      name: isPooled ? range : full,
      full,
    };
  };
  return {
    row: axis(ask.rows, weights.rows, "query", "queries"),
    col: axis(ask.cols, weights.cols, "key", "keys"),
  };
}

/** One head's weights, with each query's entropy and each key's mass. */
export function weightsShown(view, head, labels) {
  const { ask, weights, stats } = view;
  const none = (length) => new Float64Array(weights.stack * length); // they are on their way
  const of = (numbers, length, bins, isSum) =>
    binned(numbers.subarray(head * length, (head + 1) * length), bins, isSum);
  const entropy = of(stats.entropy ?? none(ask.rows), ask.rows, weights.rows, false);
  const received = of(
    summed(stats.received ?? none(ask.cols), weights.stack * ask.cols),
    ask.cols,
    weights.cols,
    true,
  );
  const pooled = ask.bins === null ? "" : `, pooled to ${weights.rows} by ${weights.cols}`;
  const which = weights.stack > 1 ? `, ${headName(head, weights)}` : "";
  return {
    ...matrixOf(view, head, labels, weights.numbers),
    label:
      `Weights of ${ask.variant.variant}${which}: ${ask.rows} queries by ${ask.cols} keys${pooled}. ` +
      "Arrow keys move, Enter holds a row.",
    rowBars: { values: entropy, label: "entropy", most: Math.max(Math.log(ask.cols), ...entropy) },
    colBars: { values: received, label: "mass each key receives", most: largest(received) },
  };
}

/** One head of a matrix that is as a view's weights are, without bars. */
export function matrixOf(view, head, labels, numbers) {
  const { rows, cols } = view.weights;
  const { row, col } = namesOf(view, labels);
  const { ask } = view;
  return {
    rows,
    cols,
    about: ask.bins === null ? null : pooledAbout(ask, rows, cols),
    numbers: numbers.subarray(head * rows * cols, (head + 1) * rows * cols),
    rowLabels: row.labels,
    colLabels: col.labels,
    rowTick: row.tick,
    colTick: col.tick,
    rowName: row.name,
    colName: col.name,
    rowAxis: "query",
    colAxis: "key",
    rowBars: null,
    colBars: null,
  };
}

/** What a cell of a pooled map stands for. */
function pooledAbout(ask, rows, cols) {
  const some = (length, bins, one, many) => {
    const [least, most] = [Math.floor(length / bins), Math.ceil(length / bins)];
    if (most === 1) return `one ${one}`;
    return least === most ? `${most} ${many}` : `${least} or ${most} ${many}`;
  };
  return (
    `Pooled: a cell is the mean over ${some(ask.rows, rows, "query", "queries")} of the mass on ` +
    `${some(ask.cols, cols, "key", "keys")}, so that it may be more than any one weight.`
  );
}

/** One head's output. */
export function outputShown(view, head, labels) {
  const { rows, cols, stack, numbers } = view.output;
  const at = Math.min(head, stack - 1);
  return {
    rows,
    cols,
    numbers: numbers.subarray(at * rows * cols, (at + 1) * rows * cols),
    rowLabels: labels.length === rows && rows <= 64 ? labels : null,
    colLabels: null,
    rowTick: String,
    colTick: String,
    rowName: (i) => (labels.length === rows ? labels[i] : `row ${i}`),
    colName: (i) => `channel ${i}`,
    rowAxis: null,
    colAxis: "channel",
    rowBars: null,
    colBars: null,
    label: `Output: ${rows} rows by ${cols} channels. Arrow keys move.`,
  };
}

/** What keys receive, over all rows where each row's items are keys of its own. */
function summed(received, count) {
  if (received.length === count) return received;
  const sums = new Float64Array(count);
  received.forEach((mass, at) => (sums[at % count] += mass));
  return sums;
}

const largest = (numbers) => numbers.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
