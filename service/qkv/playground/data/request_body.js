// Encodes requests: as JSON, or as safetensors if their layer or inputs are from a file.
//
// Such tensors keep the bytes of their file, so that no number changes:
//   {dtype: "bfloat16", shape: [768, 768], data: Uint8Array, file: "model.safetensors"}

import { formatSafetensors } from "./safetensors.js";

export const JSON_TYPE = "application/json";
export const SAFETENSORS_TYPE = "application/vnd.safetensors";

/** Comparisons that send a larger layer wait for the user. */
export const AUTO_RUN_BYTES = 32 * 2 ** 20;

/** True if the tensors of a layer are bytes of a file. */
export function isFromFile(layer) {
  return areBytes(layer?.tensors);
}

/** True if a layer is one that the service has loaded: it has a name and no tensors. */
export const isLoaded = (layer) => typeof layer?.name === "string";

/** True if a layer is one of a model: from a file, or loaded. */
export const isOfModel = (layer) => isFromFile(layer) || isLoaded(layer);

const areBytes = (tensors) =>
  Object.values(tensors ?? {}).some(({ data }) => data instanceof Uint8Array);

/**
 * Encodes the body of a request.
 *
 * @param {Object} body as JSON has it; tensors are bytes if its layer or its inputs are from a file
 * @returns {{content: string|Blob, type: string}}
 */
export function encodeBody(body) {
  if (!isFromFile(body.layer) && !areBytes(body.inputs)) {
    return { content: JSON.stringify(body), type: JSON_TYPE };
  }
  const { inputs, layer, ...rest } = body;
  const { tensors: layerTensors = {}, ...fields } = layer ?? {};
  const layers = Object.entries(layerTensors).map(([name, one]) => [`layer.${name}`, one]);
  const own = layer ? { ...rest, layer: fields } : rest;
  const qkv = JSON.stringify({ ...own, encoding: "base64" });
  const file = formatSafetensors({ ...inputs, ...Object.fromEntries(layers) }, { qkv });
  return { content: file.slice(0, file.size, SAFETENSORS_TYPE), type: SAFETENSORS_TYPE };
}

/** Returns the bytes of a layer's tensors. */
export function layerBytes(layer) {
  if (!isFromFile(layer)) return 0;
  return Object.values(layer.tensors).reduce((sum, { data }) => sum + data.length, 0);
}

/** Returns the dtype of the matrices of a layer from a file. */
export function layerDtype({ tensors }) {
  return Object.values(tensors).find(({ shape }) => shape.length > 1).dtype;
}
