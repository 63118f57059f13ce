// What the service answers of a request, as the page draws it: weights in full, or pooled where
// they are too many to send, with what each row and each key comes to.

import { post } from "./api.js";
import { taken } from "./form.js";
import { inputsOf, wired } from "./inputs.js";
import { count, fromWire, toNumbers } from "./tensors.js";

const MOST_FULL = 512; // rows or columns that come one by one
const MOST_SCORES = 2 ** 22; // of all heads together
const BINS = 256;

/**
 * A request for a variant, of what stands on the page.
 *
 * @param {Object} state of the page
 * @param {Object} variant of the catalogue
 */
export function asked(state, variant = state.variant) {
  const inputs = inputsOf(state.tensors, variant, state.layer);
  const layer = state.layer && "query" in variant.inputs && inputs.x ? { layer: state.layer } : {};
  const parameters = taken(variant.parameters.properties, state.parameters);
  const [rows, cols, stack] = sizes(variant, inputs);
  const body = { inputs: wired(inputs), ...layer };
  if (Object.keys(parameters).length) body.parameters = parameters;
  // rows that are a batch's items are few numbers each, and have no bins
  const isBatch = ["B", "H", "G"].includes(variant.outputs.weights?.shape.at(-2));
  const isFull =
    isBatch || (rows <= MOST_FULL && cols <= MOST_FULL && rows * cols * stack <= MOST_SCORES);
  return {
    variant,
    path: `/v1/attention/${variant.variant}`,
    body,
    rows,
    cols,
    stack,
    bins: isFull ? null : stack > 16 ? BINS / 2 : BINS,
  };
}

/** The variants that can take what stands on the page, and have weights. */
export function able(state) {
  const isThere = (name, inputs) =>
    name in inputs || (state.layer && inputs.x && ["query", "key", "value"].includes(name));
  return [...state.variants.values()].filter((variant) => {
    const inputs = inputsOf(state.tensors, variant, state.layer);
    const needed = Object.entries(variant.inputs).filter(([, { optional }]) => !optional);
    return "weights" in variant.outputs && needed.every(([name]) => isThere(name, inputs));
  });
}

/**
 * Those among them whose weights have the shape of another's, but for itself, and that answer the
 * same question: one that takes no mask sees keys that the other does not.
 */
export function comparable(state, variant) {
  const question = ({ rows, cols, stack, body: { inputs } }) =>
    [rows, cols, stack, "mask" in inputs, "key_lengths" in inputs].join();
  const own = question(asked(state, variant));
  return able(state).filter((other) => other !== variant && question(asked(state, other)) === own);
}

/** The body of the request that answers what is drawn. */
export function shownBody({ body, bins }) {
  return bins === null ? body : { ...body, weights: { pool: bins } };
}

/**
 * Runs a request. Its map can be drawn before its statistics are there, where those take long:
 * `later`, if there is such, gets them.
 *
 * @param {Object} ask from `asked`
 * @param {AbortSignal} signal
 * @param {(call: Object) => void} ran told of every call
 */
export async function look(ask, signal, ran) {
  const hasWeights = "weights" in ask.variant.outputs;
  const run = async (what, body) => {
    const { answer, took } = await post(ask.path, body, signal);
    ran({ variant: ask.variant.variant, what, timing: answer.timing, took });
    return answer;
  };
  if (!hasWeights) {
    const answer = await run("output", { ...ask.body, outputs: ["output"] });
    return { ask, kind: null, output: stacked(answer.outputs.output), timing: answer.timing };
  }
  const statistics = async () => {
    const body = { ...ask.body, outputs: ["weights"], weights: "stats" };
    const { outputs } = await run("statistics", body);
    const named = Object.entries(outputs);
    return Object.fromEntries(named.map(([name, one]) => [name, toNumbers(fromWire(one))]));
  };
  const isFull = ask.bins === null;
  const [answer, stats] = await Promise.all([
    run(isFull ? "full weights" : "pooled weights", shownBody(ask)),
    isFull ? statistics() : {},
  ]);
  return {
    ask,
    kind: answer.weights_are,
    weights: stacked(answer.outputs.weights),
    output: stacked(answer.outputs.output),
    stats,
    later: isFull ? null : statistics,
    timing: answer.timing,
  };
}

/** One row of every head in full, fetched where the map is pooled. */
export function rowsOf(view) {
  const known = new Map();
  const { ask, weights } = view;
  return async (head, row, signal, ran) => {
    if (ask.bins === null) {
      const begin = (head * ask.rows + row) * ask.cols;
      return weights.numbers.subarray(begin, begin + ask.cols);
    }
    if (!known.has(row)) {
      const body = { ...ask.body, outputs: ["weights"], weights: { rows: [row] } };
      const { answer, took } = await post(ask.path, body, signal);
      ran({ variant: ask.variant.variant, what: `row ${row}`, timing: answer.timing, took });
      known.set(row, stacked(answer.outputs.weights).numbers);
    }
    return known.get(row).subarray(head * ask.cols, (head + 1) * ask.cols);
  };
}

/** Matrices one behind the other, whatever the axes before the last two were. */
function stacked(value) {
  const tensor = fromWire(value);
  const shape = tensor.shape.length > 1 ? tensor.shape : [1, ...tensor.shape];
  const [rows, cols] = shape.slice(-2);
  return { rows, cols, stack: count(shape.slice(0, -2)), shape, numbers: toNumbers(tensor) };
}

/** Rows and columns of the weights, and how many such maps there are. */
function sizes(variant, inputs) {
  const letters = variant.outputs.weights?.shape.slice(-2) ?? ["L", "S"];
  const size = (letter) => {
    for (const [name, { shape }] of Object.entries(variant.inputs)) {
      const at = shape.indexOf(letter) - shape.length;
      const here = inputs[name]?.shape.at(at);
      if (shape.includes(letter) && here !== undefined) return here;
    }
    return inputs.x?.shape.at(-2) ?? 1; // through a layer
  };
  const [first] = Object.entries(variant.inputs)
    .filter(([name]) => name in inputs)
    .map(([name]) => inputs[name].shape);
  return [...letters.map(size), count(first?.slice(0, -2) ?? [])];
}

/** Numbers of positions as those of bins: the bin of i of n is floor(i bins / n). */
export function binned(numbers, bins, isSum) {
  if (bins >= numbers.length) return numbers;
  const sums = new Float64Array(bins);
  const counts = new Float64Array(bins);
  numbers.forEach((value, i) => {
    const bin = Math.floor((i * bins) / numbers.length);
    sums[bin] += value;
    counts[bin] += 1;
  });
  return isSum ? sums : sums.map((sum, bin) => sum / counts[bin]);
}

/** The first position of a bin. */
export const firstOf = (bin, bins, length) =>
  bins >= length ? bin : Math.ceil((bin * length) / bins);

/** The bin of a position. */
export const binOf = (position, bins, length) =>
  bins >= length ? position : Math.floor((position * bins) / length);
