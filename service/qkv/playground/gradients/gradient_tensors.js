// Finds the numbers that a chosen entry of the output depends on: those of its item of the batch.

import { countElements, toNumbers } from "../data/tensors.js";
import { isHeads } from "../weights/axis_letters.js";
import { outputIndex } from "../weights/heatmap_data.js";

/**
 * Finds the chosen entry in the output of a run.
 *
 * @param {Object} view of the run
 * @param {number} head that is shown
 * @param {{row: number, col: number}|null} entry that the user chose; null: the first channel of the
 *   last row, which sees every key
 * @returns {Object}
 *   row, col: in the map of the output; at: index in the output
 *   item: of the batch; atInItem: index in the output of the item
 *   head: of the item; heads: number of them
 */
export function locateEntry(view, head, entry) {
  const { rows, cols, shape } = view.output;
  const row = Math.min(entry?.row ?? rows - 1, rows - 1);
  const col = Math.min(entry?.col ?? 0, cols - 1);
  const matrix = outputIndex(view, head);
  const at = (matrix * rows + row) * cols + col;
  const isItem = view.request.variant.outputs.output.shape.length === 2; // each row is an item
  const heads = shape.length > 3 ? shape.at(-3) : 1;
  const item = isItem ? row : Math.floor(matrix / heads);
  const itemSize = isItem ? cols : heads * rows * cols;
  return { row, col, at, item, atInItem: at - item * itemSize, head: matrix % heads, heads };
}

/** True if the inputs of a request have an axis of the batch, judged by the first one. */
export function hasBatch(request) {
  const name = Object.keys(request.inputs).find((one) => !isOptional(request, one));
  const letters = lettersOf(request, name);
  const headCount = letters.filter(isHeads).length;
  return letters.length - request.inputs[name].shape.length <= headCount;
}

/**
 * Lists the inputs whose gradients are shown: those that the variant requires for each item.
 *
 * @param {Object} request from `buildRequest`
 * @param {Object} place of the entry, from `locateEntry`
 * @returns {Array<Object>}
 *   name; letters: of its axes
 *   rows, cols: of the matrix of the entry's head; start: its first index in the item
 *   offset: first index of the item in the tensor
 */
export function listTensors(request, place) {
  const isShown = (name) => !isOptional(request, name) && lettersOf(request, name)[0] === "B";
  const names = Object.keys(request.inputs).filter(isShown);
  return names.map((name) => {
    const tensor = request.inputs[name];
    const { shape, offset } = locateItem(tensor, hasBatch(request), place.item);
    const [rows, cols] = [shape.at(-2) ?? 1, shape.at(-1)];
    const heads = shape.length > 2 ? shape[0] : 1;
    const start = Math.floor((place.head * heads) / place.heads) * rows * cols;
    return { name, letters: lettersOf(request, name), rows, cols, start, offset };
  });
}

/** Returns the shape of one item of a tensor, and the index of its first number. */
function locateItem({ shape }, isBatch, item) {
  if (!isBatch) return { shape, offset: 0 };
  const offset = shape[0] > 1 ? item * countElements(shape.slice(1)) : 0;
  return { shape: shape.slice(1), offset };
}

/**
 * Returns an input of one item alone.
 *
 * @param {Object} view of the run
 * @param {string} name of the input
 * @param {number} item of the batch
 * @returns {{shape: number[], numbers: Float64Array, isShared: boolean}} `isShared`: it has no axis
 *   of the batch, and applies to every item
 */
export function readItem({ request, weights }, name, item) {
  const tensor = request.inputs[name];
  const letters = lettersOf(request, name);
  const isBatch = letters.length === 1 || hasBatch(request); // lists have their axis in any request
  // a mask with fewer axes than the weights is broadcast to them
  const isBroadcast = name === "mask" && tensor.shape.length < weights.tensor.shape.length;
  const numbers = toNumbers(tensor);
  if (letters[0] !== "B" || isBroadcast || (name === "mask" && !isBatch)) {
    return { shape: tensor.shape, numbers, isShared: true };
  }
  const { shape, offset } = locateItem(tensor, isBatch, item);
  const size = countElements(shape);
  return { shape, numbers: numbers.subarray(offset, offset + size), isShared: false };
}

const isOptional = ({ variant }, name) => variant.inputs[name]?.optional ?? false;

/** Returns the letters of an input's axes; a layer takes embeddings in place of the required ones. */
function lettersOf(request, name) {
  const { body, variant } = request;
  if (!body.layer || isOptional(request, name)) return variant.inputs[name].shape;
  return ["B", name === "key" || name === "value" ? "S" : "L", "M"];
}
