// Prepares the matrices of a view for the heat maps, with labels and bars.

import { formatNumber } from "../dom.js";
import { matchLabels } from "../inputs/labels.js";
import { largestSize } from "./colors.js";
import { headName } from "./head_grid.js";
import { findMasked } from "./masked_cells.js";
import { binValues, firstOfBin } from "./weights_request.js";

/** Returns the names of rows and columns of a view's weights: in the map, and in full. */
export function axisNames(view, labels) {
  const { request, weights } = view;
  const matched = matchLabels(labels, request.rows, request.cols);
  const axis = (tokens, length, bins, one, many) => {
    const repeated = new Set(tokens.filter((word, i) => tokens.indexOf(word) !== i));
    const fullName = (i) => {
      if (i >= tokens.length) return `${one} ${i}`;
      return repeated.has(tokens[i]) ? `${tokens[i]} (${i})` : tokens[i];
    };
    const isPooled = bins < length;
    const rangeName = (bin) =>
      `${many} ${firstOfBin(bin, bins, length)} to ${firstOfBin(bin + 1, bins, length) - 1}`;
    return {
      labels: isPooled || !tokens.length ? null : fillLabels(tokens, length),
      tick: (i) => String(firstOfBin(i, bins, length)),
      name: isPooled ? rangeName : fullName,
      fullName,
    };
  };
  return {
    row: axis(matched.row, request.rows, weights.rows, "query", "queries"),
    col: axis(matched.col, request.cols, weights.cols, "key", "keys"),
  };
}

/** Returns a label for each position: its index if there are fewer labels. */
const fillLabels = (tokens, length) => Array.from({ length }, (_, i) => tokens[i] ?? String(i));

/** Returns the weights of one head, with the entropy of each query and the mass of each key. */
export function weightsMatrix(view, head, labels) {
  const { request, weights, stats } = view;
  const zeros = (length) => new Float64Array(weights.stack * length); // until the statistics arrive
  const binHead = (numbers, length, bins, isSum) =>
    binValues(numbers.subarray(head * length, (head + 1) * length), bins, isSum);
  const entropy = binHead(stats.entropy ?? zeros(request.rows), request.rows, weights.rows, false);
  const received = binHead(
    sumByKey(stats.received ?? zeros(request.cols), weights.stack * request.cols),
    request.cols,
    weights.cols,
    true,
  );
  const poolingNote = request.bins === null ? "" : `, pooled to ${weights.rows} by ${weights.cols}`;
  const headNote = describeHead(head, weights);
  return {
    ...headMatrix(view, head, labels, weights.numbers),
    title: `Weights of ${describeRun(request)}${headNote}`,
    tensors: tensorsOf(view),
    label: `Weights of ${request.variant.variant}${headNote}: ${request.rows} queries by ${request.cols} keys${poolingNote}.`,
    rowBars:
      view.kind === "signed"
        ? null
        : {
            values: entropy,
            label: "entropy",
            max: Math.max(Math.log(request.cols), largestSize(entropy)),
          },
    colBars: { values: received, label: "mass each key receives", max: largestSize(received) },
  };
}

/** Returns the name of a head for the end of a title; empty if there is only one. */
export const describeHead = (head, tensor) =>
  tensor.stack > 1 || tensor.place ? `, ${headName(head, tensor)}` : "";

/** Names a variant with its parameters: softmax (causal, scale 2). */
export function describeRun({ variant, body: { parameters = {} } }) {
  const toText = (value) =>
    typeof value === "number" ? formatNumber(value) : JSON.stringify(value);
  const values = Object.entries(parameters).map(([name, value]) =>
    value === true ? name : `${name} ${toText(value)}`,
  );
  return values.length ? `${variant.variant} (${values.join(", ")})` : variant.variant;
}

/** Returns the inputs and the outputs of a run, by name. */
function tensorsOf({ request, weights, output }) {
  const name = request.bins === null ? "weights" : "pooled_weights";
  const found = weights ? { [name]: weights.tensor } : {};
  return { ...request.inputs, ...found, output: output.tensor };
}

/** Returns one head of numbers in the shape of a view's weights, without bars. */
export function headMatrix(view, head, labels, numbers) {
  const { rows, cols } = view.weights;
  const { row, col } = axisNames(view, labels);
  const { request } = view;
  const ownNumbers = numbers.subarray(head * rows * cols, (head + 1) * rows * cols);
  return {
    rows,
    cols,
    about: request.bins === null ? null : describePooling(request, rows, cols),
    numbers: ownNumbers,
    masked: findMasked(view, head, ownNumbers),
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

/** Describes a cell of a pooled map. */
function describePooling(request, rows, cols) {
  const describeSize = (length, bins, one, many) => {
    const [least, most] = [Math.floor(length / bins), Math.ceil(length / bins)];
    if (most === 1) return `one ${one}`;
    return least === most ? `${most} ${many}` : `${least} or ${most} ${many}`;
  };
  return (
    `Pooled: a cell is the mean over ${describeSize(request.rows, rows, "query", "queries")} of the mass on ` +
    `${describeSize(request.cols, cols, "key", "keys")}. It can exceed each single weight.`
  );
}

/** Returns the index of the output of a head: a layer merges the heads of an item. */
export function outputIndex({ output, weights }, head) {
  return weights ? Math.floor((head * output.stack) / weights.stack) : head;
}

/** Returns the output of one head. */
export function outputMatrix(view, head, labels) {
  const { rows, cols, numbers } = view.output;
  const at = outputIndex(view, head);
  const title = `Output of ${describeRun(view.request)}${describeHead(at, view.output)}`;
  const tokens = rows === view.request.rows ? matchLabels(labels, rows, view.request.cols).row : [];
  return {
    rows,
    cols,
    numbers: numbers.subarray(at * rows * cols, (at + 1) * rows * cols),
    rowLabels: tokens.length && rows <= 64 ? fillLabels(tokens, rows) : null,
    colLabels: null,
    rowTick: String,
    colTick: String,
    rowName: (i) => tokens[i] ?? `row ${i}`,
    colName: (i) => `channel ${i}`,
    rowAxis: null,
    colAxis: "channel",
    rowBars: null,
    colBars: null,
    title,
    tensors: tensorsOf(view),
    label: `Output: ${rows} rows by ${cols} channels.`,
  };
}

/** Sums what each key receives over all rows, if each row has keys of its own. */
function sumByKey(received, count) {
  if (received.length === count) return received;
  const sums = new Float64Array(count);
  received.forEach((mass, at) => (sums[at % count] += mass));
  return sums;
}
