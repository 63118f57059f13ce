// Finds the keys that a query may not see, and hatches their cells: their weights are not small, they
// do not exist.

import { toNumbers } from "../data/tensors.js";
import { firstOfBin } from "./weights_request.js";

const MASKED_SCORE = -1e4; // a floating mask below it hides a key, as -Infinity does
const STEP = 6; // between the lines of the hatching, pixels

/**
 * Finds the cells of one head whose weight is 0 because no query of the cell may see a key of it.
 *
 * @param {Object} view of a run with weights
 * @param {number} head index of the matrix in the stack
 * @param {Float64Array} numbers of the matrix
 * @returns {Float64Array|null} 1 for each masked cell; null if there is none
 */
export function findMasked({ request, weights }, head, numbers) {
  const isHidden = createHidden(request, weights, head);
  if (!isHidden) return null;
  const { rows, cols } = weights;
  const endsOf = (bins, length) =>
    Array.from({ length: bins }, (_, bin) => [
      firstOfBin(bin, bins, length),
      firstOfBin(bin + 1, bins, length) - 1,
    ]);
  const [queryEnds, keyEnds] = [endsOf(rows, request.rows), endsOf(cols, request.cols)];
  const masked = numbers.map((weight, at) => {
    if (weight !== 0) return 0;
    const [firstQuery, lastQuery] = queryEnds[Math.floor(at / cols)];
    const [firstKey, lastKey] = keyEnds[at % cols];
    return (
      isHidden(lastQuery, firstKey) &&
      isHidden(firstQuery, lastKey) &&
      isHidden(firstQuery, firstKey) &&
      isHidden(lastQuery, lastKey)
    );
  });
  return masked.includes(1) ? masked : null;
}

/** Returns a function that says if a query may not see a key; null if each sees all of them. */
function createHidden({ variant, body, inputs, rows, cols, bins }, weights, head) {
  const { properties } = variant.parameters;
  const parameter = (name) => body.parameters?.[name] ?? properties[name]?.default;
  const place = placeOf(head, weights.shape.slice(0, -2));
  const lengths = inputs.key_lengths && toNumbers(inputs.key_lengths);
  const length = lengths ? lengths[lengths.length > 1 ? place[0] : 0] : cols;
  const isHiddenByMask = bins === null && inputs.mask ? readMask(inputs.mask, place) : () => false;
  const isCausal = "causal" in properties ? parameter("causal") : "state.version" in variant.inputs;
  const [left, right] = parameter("window") ?? [null, null];
  if (!isCausal && left === null && right === null && !lengths && !inputs.mask) return null;
  const offset = parameter("query_offset") ?? 0;
  const start = offset === "end" ? length - rows : offset;
  return (query, key) => {
    const distance = key - (query + start); // positive: the key comes after the query
    if (key >= length || (isCausal && distance > 0)) return true;
    if ((left !== null && distance < -left) || (right !== null && distance > right)) return true;
    return isHiddenByMask(query, key);
  };
}

/** Returns the indices of a matrix in the axes before its own. */
function placeOf(index, axes) {
  let rest = index;
  const place = axes.map(() => 0);
  for (let axis = axes.length - 1; axis >= 0; axis -= 1) {
    place[axis] = rest % axes[axis];
    rest = Math.floor(rest / axes[axis]);
  }
  return place;
}

/** Returns a function that says if a mask, which is broadcast to the weights, hides a key. */
function readMask(mask, place) {
  const { shape, dtype } = mask;
  const numbers = toNumbers(mask);
  const isHidden = dtype === "bool" ? (value) => value === 0 : (value) => value < MASKED_SCORE;
  const [rows, cols] = [1, 1, ...shape].slice(-2);
  const axes = shape.slice(0, -2);
  const item = axes.reduce(
    (at, size, axis) => at * size + (size > 1 ? place.at(axis - axes.length) : 0),
    0,
  );
  return (query, key) =>
    isHidden(numbers[(item * rows + (rows > 1 ? query : 0)) * cols + (cols > 1 ? key : 0)]);
}

/** Hatches the masked cells of a heat map. */
export function hatchMasked(context, { rows, cols, masked }, layout, { muted }) {
  const { left, top, width, height, cellWidth, cellHeight } = layout;
  context.save();
  context.beginPath();
  for (let row = 0; row < rows; row += 1) {
    for (let col = 0; col < cols; col += 1) {
      const start = col;
      while (col < cols && masked[row * cols + col]) col += 1;
      const run = [(col - start) * cellWidth, cellHeight];
      if (col > start) context.rect(left + start * cellWidth, top + row * cellHeight, ...run);
    }
  }
  context.clip();
  hatch(context, [left, top, width, height], muted);
  context.restore();
}

/** Draws parallel lines over an area. */
export function hatch(context, [left, top, width, height], colour) {
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.beginPath();
  for (let x = left - height; x < left + width; x += STEP) {
    context.moveTo(x, top + height);
    context.lineTo(x + height, top);
  }
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.globalAlpha = 0.55;
  context.stroke();
  context.restore();
}
