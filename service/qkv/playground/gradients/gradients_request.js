// Requests the gradients of one entry of the output, if the inputs are small enough to show.

import { post } from "../api.js";
import { isOfModel } from "../data/request_body.js";
import { countElements, fromNumbers, fromWire, toNumbers } from "../data/tensors.js";
import { encodeInputs } from "../inputs/request_inputs.js";
import { listTensors } from "./gradient_tensors.js";
import { widenBody } from "./wide_body.js";

const MAX_INPUT_NUMBERS = 2 ** 16;
const MAX_LAYER_NUMBERS = 2 ** 20; // the response has the gradients of the layer too

/** Returns why the page shows no gradients of a run; null if it shows them. */
export function reasonWithoutGradients({ request: { variant, inputs, body } }) {
  if (!variant.gradients?.length) return `${variant.variant} has no gradients.`;
  if (Object.keys(inputs).some((name) => name.startsWith("state."))) {
    return "Gradients are shown for runs without a state.";
  }
  const counts = [
    ["inputs", countNumbers(inputs), MAX_INPUT_NUMBERS],
    ["layers", countNumbers(body.layer?.tensors), MAX_LAYER_NUMBERS],
  ];
  const tooMany = counts.find(([, count, limit]) => count > limit);
  if (!tooMany) return null;
  const [what, count, limit] = tooMany.map((one) => one.toLocaleString("en"));
  return `Gradients are shown for ${what} of up to ${limit} numbers. This run has ${count}.`;
}

/** Returns why gradients are not checked by finite differences; null if they are. */
export function reasonWithoutDifferences({ request: { body } }) {
  if (body.parameters?.dropout) return "Dropout draws other weights for each run";
  if (isOfModel(body.layer)) return "The layer of a model is not in float64";
  return null;
}

/**
 * Builds the request for the gradients of the entry at a place, in float64: where a gradient is the
 * difference of large terms, narrower ones are all rounding.
 */
export function buildGradientsRequest({ request, output }, place) {
  const { body, inputs, variant } = request;
  const { dtype, shape, literal } = output.tensor;
  const numbers = new Float64Array(countElements(shape));
  numbers[place.at] = 1;
  const entry = { grad_output: { ...fromNumbers(numbers, shape, dtype), literal } };
  const ownInputs = { ...body.inputs, ...encodeInputs(entry, body.layer) };
  return {
    path: `/v1/gradients/${variant.variant}`,
    body: isOfModel(body.layer)
      ? { ...body, inputs: ownInputs }
      : widenBody(body, { ...inputs, ...entry }),
  };
}

/**
 * Sends the request.
 *
 * @returns {Promise<{tensors: Array<Object>, timing: Object, elapsedMs: number}>} `tensors`: as from
 *   `listTensors`, each with the gradients of its matrix, and NaN as `quotients`
 */
export async function fetchGradients({ request }, place, { path, body }, signal) {
  const { result, elapsedMs } = await post(path, body, signal);
  const tensors = listTensors(request, place).map((tensor) => {
    const all = toNumbers(fromWire(result.gradients[tensor.name]));
    const start = tensor.offset + tensor.start;
    const gradients = all.slice(start, start + tensor.rows * tensor.cols);
    const quotients = gradients.map(() => NaN); // until they are computed
    return { ...tensor, gradients, quotients };
  });
  return { tensors, timing: result.timing, elapsedMs };
}

/** Returns the count of all numbers of tensors or nested lists. */
function countNumbers(tensors) {
  const count = (one) => (one.shape ? countElements(one.shape) : [one].flat(Infinity).length);
  return Object.values(tensors ?? {}).reduce((sum, one) => sum + count(one), 0);
}
