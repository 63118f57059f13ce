// Computes central differences of one entry of the output, (f(x + h) - f(x - h)) / 2h, in float64.
//
// The service runs the variant once for each x + h and x - h: they are the items of one batch.

import { post } from "../api.js";
import { countElements, fromNumbers, fromWire, toNumbers } from "../data/tensors.js";
import { readItem } from "./gradient_tensors.js";
import { isWhole, widenBody } from "./wide_body.js";

/** h, for numbers of size 1: near the cube root of eps, where rounding and curvature are equal. */
export const STEP = 2 ** -17;

const MAX_NUMBERS = 2 ** 19; // of a request and its response

/**
 * Computes the differences for the entries of one input.
 *
 * @param {Object} view of a run
 * @param {Object} place of the entry of the output, from `locateEntry`
 * @param {Object} tensor the input, from `fetchGradients`; its largest gradients are checked if one
 *   request cannot check all
 * @param {AbortSignal} signal
 * @returns {Promise<{quotients: Float64Array, timing: Object, elapsedMs: number}>} `quotients`: the
 *   differences; NaN for an entry that is not checked
 */
export async function fetchDifferences(view, place, tensor, signal) {
  const { gradients } = tensor;
  const items = readItems(view, place.item);
  const entries = chooseEntries(gradients, countEntries(view, items));
  const { numbers } = items[tensor.name];
  const batch = new Float64Array(2 * entries.length * numbers.length);
  entries.forEach((entry, i) => {
    const at = tensor.start + entry;
    const step = STEP * Math.max(1, Math.abs(numbers[at]));
    [1, -1].forEach((sign, side) => {
      const start = (2 * i + side) * numbers.length;
      batch.set(numbers, start);
      batch[start + at] += sign * step;
    });
  });
  const body = buildBody(view.request, items, { [tensor.name]: batch }, 2 * entries.length);
  const { result, elapsedMs } = await post(view.request.path, body, signal);
  const outputs = toNumbers(fromWire(result.outputs.output));
  const size = outputs.length / (2 * entries.length);
  const quotients = new Float64Array(gradients.length).fill(NaN);
  entries.forEach((entry, i) => {
    const [above, below] = [0, 1].map((side) => (2 * i + side) * numbers.length + tensor.start);
    const [high, low] = [0, 1].map((side) => outputs[(2 * i + side) * size + place.atInItem]);
    quotients[entry] = (high - low) / (batch[above + entry] - batch[below + entry]);
  });
  return { quotients, timing: result.timing, elapsedMs };
}

/** Returns the inputs of one item, by name. */
function readItems(view, item) {
  const names = Object.keys(view.request.inputs);
  return Object.fromEntries(names.map((name) => [name, readItem(view, name, item)]));
}

/** Returns how many entries one request can check. */
function countEntries({ output }, items) {
  const own = Object.values(items).filter(({ isShared }) => !isShared);
  const outputSize = output.numbers.length; // at least that of the item
  return Math.max(
    1,
    Math.floor(
      MAX_NUMBERS / 2 / own.reduce((n, { shape }) => n + countElements(shape), outputSize),
    ),
  );
}

/** Returns the indices of the largest gradients, at most `count`. */
function chooseEntries(gradients, count) {
  const indices = Array.from(gradients.keys());
  if (indices.length <= count) return indices;
  const size = (at) => Math.abs(gradients[at]);
  return indices.sort((a, b) => size(b) - size(a) || a - b).slice(0, count);
}

/** Builds the request for a batch of copies of one item, with the numbers of some inputs replaced. */
function buildBody({ body, inputs }, items, replaced, count) {
  const copy = ([name, { shape, numbers, isShared }]) => {
    const all = isShared ? numbers : (replaced[name] ?? repeat(numbers, count));
    const batch = isShared ? shape : [count, ...shape];
    const { dtype, literal } = inputs[name];
    return isWhole(name, inputs[name])
      ? [name, { ...fromNumbers(all, batch, dtype), literal }]
      : [name, fromNumbers(all, batch, "float64")];
  };
  const copies = Object.fromEntries(Object.entries(items).map(copy));
  return { ...widenBody(body, copies), encoding: "base64", outputs: ["output"] };
}

/** Returns numbers several times over. */
function repeat(numbers, count) {
  const all = new Float64Array(count * numbers.length);
  for (let i = 0; i < count; i += 1) all.set(numbers, i * numbers.length);
  return all;
}
