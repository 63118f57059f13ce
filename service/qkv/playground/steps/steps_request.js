// Requests the steps of a run, if they are small enough to show.

import { post } from "../api.js";
import { countElements, fromWire, toNumbers } from "../data/tensors.js";
import { omittedLetters } from "../weights/axis_letters.js";

const NUMBER_BYTES = 8; // steps are float64
const MAX_HEAD_WIDTHS = 2; // a layer's heads are at most this many times as wide as M / H

/** Returns why the page shows no steps of a run; null if it shows them. */
export function reasonWithoutSteps(view) {
  const { variant, inputs } = view.request;
  if (!variant.steps) return `${variant.variant} has no steps to show.`;
  if (Object.keys(inputs).some((name) => name.startsWith("state."))) {
    return "Steps are shown for runs without a state.";
  }
  const { max_tokens: maxTokens, max_items: maxItems, max_bytes: maxBytes } = variant.steps;
  const sizes = findSizes(view);
  const numbers = listSteps(view).map(({ axes }) =>
    countElements(axes.map((one) => sizes[one] ?? 1)),
  );
  const counts = [
    ["tokens", Math.max(sizes.L ?? 1, sizes.S ?? 1), maxTokens],
    ["items of a batch", sizes.B ?? 1, maxItems],
    ["numbers", numbers.reduce((sum, one) => sum + one, 0), maxBytes / NUMBER_BYTES],
  ];
  const tooMany = counts.find(([, count, limit]) => count > limit);
  if (!tooMany) return null;
  const [what, count, limit] = tooMany.map((one) => one.toLocaleString("en"));
  const about = what === "numbers" && view.request.body.layer ? "about " : "";
  return `Steps are shown for up to ${limit} ${what}. This run has ${about}${count}.`;
}

/** Returns the steps that a run has: entries of the catalogue. */
export function listSteps({ request: { variant, inputs, body } }) {
  const isGiven = (name) => {
    if (name in inputs) return true;
    const layer = { alibi_slopes: body.layer?.alibi, ...body.layer };
    const value =
      body.parameters?.[name] ?? layer[name] ?? variant.parameters.properties[name]?.default;
    return Boolean(value);
  };
  return variant.steps.names.filter(({ needs }) => !needs?.length || needs.some(isGiven));
}

/** Returns the size of each axis of a run by its letter; those of a layer's heads are estimates. */
function findSizes(view) {
  const { request, weights, output } = view;
  const { variant, inputs, body, rows, cols } = request;
  const sizes = { B: 1, L: rows, S: cols };
  const omitted = omittedLetters(view);
  for (const [name, { shape }] of Object.entries(variant.inputs)) {
    const letters = shape.filter((letter) => !omitted.has(letter));
    const own = inputs[name]?.shape;
    if (own?.length !== letters.length || (body.layer && !variant.inputs[name].optional)) continue;
    letters.forEach((letter, axis) => (sizes[letter] = Math.max(sizes[letter] ?? 1, own[axis])));
  }
  if (body.layer) {
    const heads = weights.shape.length > 3 ? weights.shape.at(-3) : 1;
    const width = Math.max(output.cols, inputs.x?.shape.at(-1) ?? 1) / heads;
    const estimate = MAX_HEAD_WIDTHS * Math.ceil(width);
    const axes = { B: weights.stack / heads, H: heads, G: heads, D: estimate, E: estimate };
    Object.assign(sizes, axes, { J: heads, V: heads });
  }
  const { rank } = { rank: variant.parameters.properties.rank?.default, ...body.parameters };
  sizes.T = Math.max(sizes.G ?? 1, sizes.V ?? 1);
  return { H: Math.max(sizes.T, sizes.J ?? 1), R: rank ?? cols, ...sizes };
}

/**
 * Requests the steps.
 *
 * @returns {Promise<{steps: Array<Object>, timing: Object, elapsedMs: number}>} `steps`: entries of
 *   the catalogue, each with the letters of its axes in the response, its shape and its numbers; the
 *   x of a layer is the first one
 */
export async function fetchSteps(view, signal) {
  const { path, body, inputs } = view.request;
  const wanted = { ...body, outputs: ["steps"], encoding: "base64" };
  const { result, elapsedMs } = await post(path, wanted, signal);
  const omitted = omittedLetters(view);
  const named = listSteps(view).filter(({ name }) => `steps.${name}` in result.outputs);
  const steps = named.map((entry) =>
    describe(entry, omitted, fromWire(result.outputs[`steps.${entry.name}`])),
  );
  const first = body.layer && inputs.x ? [describe(X, omitted, inputs.x)] : [];
  return { steps: [...first, ...steps], timing: result.timing, elapsedMs };
}

const X = {
  name: "x",
  axes: ["B", "L", "M"],
  symbol: null,
  summary: "The hidden states, which the layer projects to queries, keys and values.",
  rows: "L",
};

function describe(entry, omitted, tensor) {
  const letters = entry.axes.filter((letter) => !omitted.has(letter));
  return { ...entry, letters, shape: tensor.shape, numbers: toNumbers(tensor) };
}
