// Takes the numbers of one head and one row out of a step.

import { countElements } from "../data/tensors.js";
import { isHeads } from "../weights/axis_letters.js";

/**
 * Returns the numbers of a step for a head and a row.
 *
 * @param {Object} step from `fetchSteps`
 * @param {{item, head, heads, row}} place `head` of `heads` of an item of the batch; `row` to follow
 * @returns {Object}
 *   rows, cols, numbers: of the row: one number, a line, or a matrix; of the head if no row is followed
 *   rowLetter, colLetter: of its axes, or null
 *   head: numbers of the head, all rows
 *   picture: {rows, cols, row} of the head as a matrix with the followed row; null without one
 */
export function sliceStep({ letters, shape, numbers, rows: followed }, { item, head, heads, row }) {
  let start = 0;
  let size = numbers.length;
  let at = 0;
  for (; isFixed(letters[at], followed); at += 1) {
    size /= shape[at];
    const index = letters[at] === "B" ? item : Math.floor((head * shape[at]) / heads);
    start += size * Math.min(index, shape[at] - 1);
  }
  const all = numbers.subarray(start, start + size);
  const isFollowed = followed !== null && letters[at] === followed;
  const inner = letters.slice(isFollowed ? at + 1 : at);
  const sizes = shape.slice(isFollowed ? at + 1 : at);
  const count = countElements(sizes);
  const line = isFollowed ? Math.min(row, shape[at] - 1) : 0;
  return {
    rows: sizes.length > 1 ? sizes[0] : 1,
    cols: sizes.at(-1) ?? 1,
    rowLetter: inner.length > 1 ? inner[0] : null,
    colLetter: inner.at(-1) ?? null,
    numbers: all.subarray(line * count, (line + 1) * count),
    head: all,
    picture:
      isFollowed && inner.length === 1 ? { rows: shape[at], cols: sizes[0], row: line } : null,
    offset: line * count,
  };
}

/** True for an axis of which one entry is shown: the item, unless rows are items, and the head. */
const isFixed = (letter, followed) =>
  (letter === "B" && followed !== "B") || (letter !== undefined && isHeads(letter));
