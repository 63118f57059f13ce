// Builds the page's requests and fetches the weights: in full, or pooled if they are too many to
// send. Also fetches statistics of each row and each key.

import { post } from "../api.js";
import { countElements, fromWire, toNumbers } from "../data/tensors.js";
import { pickParameters } from "../inputs/parameter_form.js";
import { encodeInputs, inputsFor } from "../inputs/request_inputs.js";

const MAX_FULL_SIZE = 512; // rows or columns of full weights
const MAX_FULL_SCORES = 2 ** 22; // of all heads together
const POOL_BINS = 256;
const STATISTICS = "statistics";

/**
 * Builds the request of the page for a variant.
 *
 * @param {Object} state of the page
 * @param {Object} variant an entry of the catalogue
 */
export function buildRequest(state, variant = state.variant) {
  const inputs = inputsFor(state.tensors, variant, state.layer);
  const isProjected = state.layer && "query" in variant.inputs && (inputs.x || inputs.query);
  const layer = isProjected ? { layer: state.layer } : {};
  const parameters = pickParameters(variant.parameters.properties, state.parameters);
  const [rows, cols, stack] = weightSizes(variant, inputs, layer.layer);
  const body = { inputs: encodeInputs(inputs, layer.layer), ...layer };
  if (Object.keys(parameters).length) body.parameters = parameters;
  if (state.dtype) body.dtype = state.dtype;
  // rows that are the items of a batch are short and cannot be pooled
  const isBatch = ["B", "H", "G"].includes(variant.outputs.weights?.shape.at(-2));
  const isSmall = Math.max(rows, cols) <= MAX_FULL_SIZE && rows * cols * stack <= MAX_FULL_SCORES;
  const isFull = isBatch || (isSmall && !state.pool);
  return {
    variant,
    path: `/v1/attention/${variant.variant}`,
    inputs,
    body,
    rows,
    cols,
    stack,
    place: state.place,
    bins: isFull ? null : (state.pool ?? (stack > 16 ? POOL_BINS / 2 : POOL_BINS)),
  };
}

/** Returns the variants with weights that accept the tensors of the page. */
export function runnableVariants(state) {
  const hasInput = (name, inputs) =>
    name in inputs || (state.layer && inputs.x && ["query", "key", "value"].includes(name));
  return [...state.variants.values()].filter((variant) => {
    const inputs = inputsFor(state.tensors, variant, state.layer);
    const needed = Object.entries(variant.inputs).filter(([, { optional }]) => !optional);
    return "weights" in variant.outputs && needed.every(([name]) => hasInput(name, inputs));
  });
}

/**
 * Returns the other variants whose weights have the same shape and which use the same mask and
 * key lengths: a variant without a mask sees other keys.
 */
export function comparableVariants(state, variant) {
  const outputKey = ({ rows, cols, stack, body: { inputs } }) =>
    [rows, cols, stack, "mask" in inputs, "key_lengths" in inputs].join();
  const ownKey = outputKey(buildRequest(state, variant));
  return runnableVariants(state).filter(
    (other) => other !== variant && outputKey(buildRequest(state, other)) === ownKey,
  );
}

/** Returns the body of the request for the heat map. */
export function heatmapBody({ body, bins }) {
  return bins === null ? body : { ...body, weights: { pool: bins } };
}

/**
 * Runs a request. Statistics of large maps take long: then the result has `fetchStats`, and the page
 * draws the map first.
 *
 * @param {Object} request from `buildRequest`
 * @param {AbortSignal} signal
 * @param {(call: Object) => void} onCall called for each request
 */
export async function fetchView(request, signal, onCall) {
  const { place } = request;
  const hasWeights = "weights" in request.variant.outputs;
  const runRequest = async (what, body) => {
    const { result, elapsedMs } = await post(request.path, body, signal);
    const isRun = what !== STATISTICS;
    onCall({ variant: request.variant.variant, what, timing: result.timing, elapsedMs, isRun });
    return result;
  };
  if (!hasWeights) {
    const result = await runRequest("output", { ...request.body, outputs: ["output"] });
    return { request, kind: null, output: toStack(result.outputs.output), timing: result.timing };
  }
  const fetchStatistics = async () => {
    const body = { ...request.body, outputs: ["weights"], weights: "stats" };
    const { outputs } = await runRequest(STATISTICS, body);
    const named = Object.entries(outputs);
    return Object.fromEntries(named.map(([name, one]) => [name, toNumbers(fromWire(one))]));
  };
  const isFull = request.bins === null;
  const [result, stats] = await Promise.all([
    runRequest(isFull ? "full weights" : "pooled weights", heatmapBody(request)),
    isFull ? fetchStatistics() : {},
  ]);
  return {
    request,
    kind: result.weights_are,
    weights: { ...withHeads(toStack(result.outputs.weights), request.body.layer), place },
    output: { ...toStack(result.outputs.output), place },
    stats,
    fetchStats: isFull ? null : fetchStatistics,
    timing: result.timing,
  };
}

/** Returns a function that reads a full row; it fetches the row if the map is pooled. */
export function createRowReader(view) {
  const cachedRows = new Map();
  const { request, weights } = view;
  return async (head, row, signal, onCall) => {
    if (request.bins === null) {
      const start = (head * request.rows + row) * request.cols;
      return weights.numbers.subarray(start, start + request.cols);
    }
    if (!cachedRows.has(row)) {
      const body = { ...request.body, outputs: ["weights"], weights: { rows: [row] } };
      const { result, elapsedMs } = await post(request.path, body, signal);
      const { timing } = result;
      onCall({ variant: request.variant.variant, what: `row ${row}`, timing, elapsedMs });
      cachedRows.set(row, toStack(result.outputs.weights).numbers);
    }
    return cachedRows.get(row).subarray(head * request.cols, (head + 1) * request.cols);
  };
}

/** Flattens all axes before the last two into one. */
function toStack(value) {
  const tensor = fromWire(value);
  const shape = tensor.shape.length > 1 ? tensor.shape : [1, ...tensor.shape];
  const [rows, cols] = shape.slice(-2);
  const stack = countElements(shape.slice(0, -2));
  return { rows, cols, stack, shape, tensor, numbers: toNumbers(tensor) };
}

/** Returns the weights of a layer's heads with an axis of batch: the service omits that of x. */
function withHeads(weights, layer) {
  const isOmitted = layer?.heads && weights.shape.length === 3;
  return isOmitted ? { ...weights, shape: [1, ...weights.shape] } : weights;
}

/** Returns rows and columns of the weights, and the number of such matrices. */
function weightSizes(variant, inputs, layer) {
  const axes = variant.outputs.weights?.shape.slice(-2) ?? ["L", "S"];
  const size = (axis) => {
    for (const [name, { shape }] of Object.entries(variant.inputs)) {
      const at = shape.indexOf(axis) - shape.length;
      const length = inputs[name]?.shape.at(at);
      if (shape.includes(axis) && length !== undefined) return length;
    }
    return inputs.x?.shape.at(-2) ?? 1; // projected by a layer
  };
  const [first] = Object.entries(variant.inputs)
    .filter(([name]) => name in inputs)
    .map(([name]) => inputs[name].shape);
  const batch = countElements((first ?? inputs.x?.shape)?.slice(0, -2) ?? []);
  return [...axes.map(size), batch * (layer?.heads ?? 1)];
}

/** Sums or averages the values of each bin; the bin of position i of n is floor(i bins / n). */
export function binValues(numbers, bins, isSum) {
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

/** Returns the first position of a bin. */
export const firstOfBin = (bin, bins, length) =>
  bins >= length ? bin : Math.ceil((bin * length) / bins);

/** Returns the bin of a position. */
export const binOfPosition = (position, bins, length) =>
  bins >= length ? position : Math.floor((position * bins) / length);
