// Widens requests to float64, in which gradients and their finite differences are computed.

import { fromNumbers, fromWire, isObject, toNumbers, toWire } from "../data/tensors.js";

/** True for lengths and masks of booleans, whose dtype is never another. */
export const isWhole = (name, { dtype }) =>
  dtype === "int64" || dtype === "bool" || name === "key_lengths";

/**
 * Returns a body in float64; lists stay lists.
 *
 * @param {Object} body
 * @param {Object} inputs tensors by name
 */
export function widenBody(body, inputs) {
  const encode = ([name, tensor]) => {
    const isKept = tensor.literal || isWhole(name, tensor);
    return [name, toWire(isKept ? tensor : widen(tensor))];
  };
  return {
    ...body,
    inputs: Object.fromEntries(Object.entries(inputs).map(encode)),
    ...(body.layer && { layer: widenLayer(body.layer) }),
    dtype: "float64",
  };
}

function widenLayer(layer) {
  const encode = ([name, tensor]) => [
    name,
    isObject(tensor) ? toWire(widen(fromWire(tensor))) : tensor, // lists have the dtype of the body
  ];
  return { ...layer, tensors: Object.fromEntries(Object.entries(layer.tensors).map(encode)) };
}

const widen = (tensor) =>
  tensor.dtype === "float64" ? tensor : fromNumbers(toNumbers(tensor), tensor.shape, "float64");
