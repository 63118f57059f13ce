// Shows thumbnails of all heads; a click on one selects it for the heat map.

import { h } from "../dom.js";
import { isDark } from "../theme.js";
import { drawThumbnail } from "./heatmap.js";

const MAX_HEADS = 64;
const MAX_THUMBNAIL = 128; // rows and columns of a thumbnail

/**
 * Creates the grid.
 *
 * @param {HTMLElement} root
 * @param {(head: number) => void} onSelect
 * @returns {(weights: {rows, cols, stack, shape, numbers}, head: number) => void}
 */
export function createHeadGrid(root, onSelect) {
  let shown = {};
  return (weights, head) => {
    const isSame = shown.weights === weights && shown.isDark === isDark();
    shown = { weights, isDark: isDark() };
    if (isSame) return markHead(root, head);
    root.hidden = weights.stack < 2;
    if (root.hidden) return root.replaceChildren();
    const size = weights.rows * weights.cols;
    const shownCount = Math.min(weights.stack, MAX_HEADS);
    const buttons = Array.from({ length: shownCount }, (_, index) => {
      const numbers = weights.numbers.subarray(index * size, (index + 1) * size);
      const image = drawThumbnail(shrink({ rows: weights.rows, cols: weights.cols, numbers }));
      image.setAttribute("aria-hidden", "true");
      return h(
        "button",
        {
          type: "button",
          "aria-pressed": String(index === head),
          click: () => onSelect(index),
        },
        image,
        h("span", {}, weights.place ? itemNumber(index, weights.place) : headName(index, weights)),
      );
    });
    const legend = h("h3", { id: "heads-title" }, weights.place ? "Sequences" : "Heads");
    const grid = h(
      "div",
      { class: "grid", role: "group", "aria-labelledby": "heads-title" },
      ...buttons,
    );
    const hiddenCount = weights.stack - shownCount;
    root.replaceChildren(
      legend,
      grid,
      ...(hiddenCount ? [h("p", { class: "hint" }, `${hiddenCount} more are not shown.`)] : []),
    );
  };
}

/** Sums blocks of cells: a thumbnail has fewer pixels than a large map has cells. */
function shrink({ rows, cols, numbers }) {
  const size = Math.ceil(Math.max(rows, cols) / MAX_THUMBNAIL);
  const [high, wide] = [Math.ceil(rows / size), Math.ceil(cols / size)];
  const sums = new Float64Array(high * wide);
  for (let row = 0; row < rows; row += 1) {
    const start = Math.floor(row / size) * wide;
    for (let col = 0; col < cols; col += 1)
      sums[start + Math.floor(col / size)] += numbers[row * cols + col];
  }
  return { rows: high, cols: wide, numbers: sums };
}

function markHead(root, head) {
  for (const [index, button] of root.querySelectorAll("button").entries())
    button.setAttribute("aria-pressed", String(index === head));
}

/**
 * Returns the name of a head, with its item if the batch has several.
 *
 * @param {number} index of the matrix in the stack
 * @param {Object} tensor {shape, stack, place}; `place`: the head of a captured model, whose numbers
 *   are those of the model
 */
export function headName(index, { shape, stack, place }) {
  const heads = shape.length > 3 ? shape.at(-3) : 1;
  if (place) {
    const name = `${place.layer || "model"}, head ${place.head}`;
    return stack > 1 ? `${name}, sequence ${itemNumber(index, place)}` : name;
  }
  if (shape.length === 3) return `item ${index}`;
  return stack > heads
    ? `item ${Math.floor(index / heads)}, head ${index % heads}`
    : `head ${index}`;
}

/** Returns the number of a sequence in the model's batch. */
const itemNumber = (index, { items }) => String(items[index] ?? index);

/** Describes the number of maps: items of the batch, heads, or both. */
export function describeStack({ shape, stack }) {
  const heads = shape.length > 3 ? shape.at(-3) : 1;
  const items = stack > heads ? `${stack / heads} items` : "";
  return [items, heads > 1 ? `${heads} heads` : ""].filter(Boolean).join(" of ");
}
