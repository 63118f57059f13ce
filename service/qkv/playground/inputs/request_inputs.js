// The inputs of a request: which tensors of the page a variant takes, which are missing, and how they
// are sent.

import { castTo } from "../checkpoint/hidden_states.js";
import { isFromFile, isOfModel, layerDtype } from "../data/request_body.js";
import { toWire } from "../data/tensors.js";

/** True if a variant has an input of this name. */
export function acceptsInput(name, variant, layer) {
  return name in variant.inputs || (name === "x" && layer !== null && "query" in variant.inputs);
}

/**
 * Returns the tensors to send to a variant, by the names of its inputs.
 *
 * Tensors for inputs of other variants are left out; the list marks them.
 *
 * @param {Array<{name, role, tensor}>} tensors
 * @param {Object} variant an entry of the catalogue
 * @param {Object|null} layer projects x
 */
export function inputsFor(tensors, variant, layer) {
  const inputs = {};
  for (const { role, tensor } of tensors) {
    for (const name of role.split(", ")) {
      if (acceptsInput(name, variant, layer)) inputs[name] = tensor;
    }
  }
  return inputs;
}

/** Returns the inputs that a variant requires and the page lacks. */
export function missingInputs({ tensors, variant, layer }) {
  if (isOfModel(layer) && "query" in variant.inputs) {
    return tensors.some(({ role }) => role === "x" || role.includes("query")) ? [] : ["x"];
  }
  if (layer) return []; // the service knows which inputs the layer projects
  const present = inputsFor(tensors, variant, layer);
  return Object.entries(variant.inputs)
    .filter(([name, { optional }]) => !optional && !(name in present))
    .map(([name]) => name);
}

/** Returns the names of the .npy files of inputs, for inputs that were uploaded as such. */
export function inputFiles(tensors) {
  const every = tensors.flatMap(({ role, file }) => role.split(", ").map((name) => [name, file]));
  return Object.fromEntries(every.filter(([, file]) => file));
}

/**
 * Encodes tensors for a request: for JSON, or in the dtype of the layer if that is from a file. Each
 * tensor is encoded once, also if several requests send it.
 */
export function encodeInputs(inputs, layer = null) {
  const dtypes = { mask: null, key_lengths: "int64" };
  const encode = (name, tensor) => {
    if (!isFromFile(layer)) return encodeTensor(tensor);
    const dtype = name in dtypes ? dtypes[name] : layerDtype(layer);
    return castTo(tensor, dtype ?? tensor.dtype);
  };
  const entries = Object.entries(inputs).map(([name, tensor]) => [name, encode(name, tensor)]);
  return Object.fromEntries(entries);
}

const encodedTensors = new WeakMap();

function encodeTensor(tensor) {
  if (!encodedTensors.has(tensor)) encodedTensors.set(tensor, toWire(tensor));
  return encodedTensors.get(tensor);
}
