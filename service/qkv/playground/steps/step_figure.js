// Shows one step: its place in the formula, its sentence, a picture of all rows, and the numbers of
// the followed row.

import { formatNumber, h } from "../dom.js";
import { isDark } from "../theme.js";
import { typeset } from "../typeset.js";
import { createShades, isLight } from "../weights/colors.js";
import { drawPicture } from "./step_picture.js";
import { sliceStep } from "./step_slices.js";

const MAX_CELLS = 768; // numbers of a table; a larger matrix is a picture
const DARK_INK = "#000000"; // black or white has a contrast of 4.5 on any colour

/**
 * Creates the figure of a step.
 *
 * @param {Object} step from `fetchSteps`
 * @param {number} number in the list
 * @param {{onPoint: (name: string|null) => void, onRow: (row: number) => void}} callbacks `onPoint`:
 *   called when pointer or focus enters and leaves the step; `onRow`: with a row that is clicked
 * @returns {{element: HTMLElement, name: string, draw: Function}}
 */
export function createStepFigure(step, number, { onPoint, onRow }) {
  const id = `step-${step.name}`;
  const title = h("h3", { id }, h("span", { class: "number" }, `${number} `), step.name);
  const symbol = step.symbol && createSymbol(step.symbol);
  const heading = h("div", { class: "step-title" }, title, ...(symbol ? [symbol] : []));
  const caption = h("figcaption", { class: "hint" }, ...typeset(step.summary));
  const picture = h("div", { class: "picture" });
  const area = { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": id };
  const numbers = h("div", area);
  const content = h("div", { class: "step-content" }, picture, numbers);
  const figure = h("figure", { "aria-labelledby": id }, heading, caption, content);
  const element = h(
    "li",
    {
      "data-step": step.name,
      pointerenter: () => onPoint(step.name),
      pointerleave: () => onPoint(null),
      focusin: () => onPoint(step.name),
      focusout: () => onPoint(null),
    },
    figure,
  );
  const mark = h("div", { class: "mark", "aria-hidden": "true" });
  let shades = null; // of the head
  let drawn = null; // what the picture shows
  let rowHeight = 0; // of the picture, pixels

  const drawPictureOf = (slice, key, isMasked) => {
    const isOfHead = slice.picture !== null; // it shows all rows, and changes with the head only
    if (isOfHead && key === drawn) return;
    const [size, cells] = isOfHead ? [slice.picture, slice.head] : [slice, slice.numbers];
    const result = drawPicture(size, cells, shades.colourOf, isMasked);
    const { canvas } = result;
    canvas.setAttribute("aria-label", `${step.name}: ${size.rows} rows by ${size.cols} columns`);
    if (isOfHead) canvas.addEventListener("click", (event) => onRow(rowAt(event, size)));
    picture.replaceChildren(canvas, ...(isOfHead ? [mark] : []));
    rowHeight = result.rowHeight;
  };
  /** Draws the step for a place; `names` of rows and columns; `isMasked` for an index of the head. */
  const draw = (place, names, isMasked) => {
    const slice = sliceStep(step, place);
    const key = [place.item, place.head, isDark(), names.key].join();
    if (key === drawn && step.rows === null) return;
    if (key !== drawn) shades = createShades(slice.head, { isDark: isDark() });
    const isLarge = slice.rows * slice.cols > MAX_CELLS;
    const isMaskedRow = (at) => isMasked(slice.offset + at);
    picture.hidden = !slice.picture && !isLarge;
    if (!picture.hidden) drawPictureOf(slice, key, slice.picture ? isMasked : isMaskedRow);
    mark.style.top = `${(slice.picture?.row ?? 0) * rowHeight}px`;
    mark.style.height = `${rowHeight}px`;
    numbers.hidden = isLarge;
    if (!isLarge) {
      const caption = step.rows === null ? step.name : `${step.name} of ${names.row(place.row)}`;
      numbers.replaceChildren(createTable(caption, slice, names, shades, isMaskedRow));
    }
    drawn = key;
  };
  return { element, name: step.name, draw };
}

const createSymbol = (text) => h("code", { class: "symbol" }, ...typeset(text));

const rowAt = ({ offsetY, target }, { rows }) =>
  Math.min(Math.max(Math.floor((rows * offsetY) / target.clientHeight), 0), rows - 1);

function createTable(caption, slice, names, shades, isMasked) {
  const { rows, cols, rowLetter, colLetter, numbers } = slice;
  const columns = Array.from({ length: cols }, (_, col) => names.axis(colLetter, col));
  const headings = columns.map((name) => h("th", { scope: "col" }, name));
  const corner = rowLetter ? [h("td", {})] : [];
  const lines = Array.from({ length: rows }, (_, row) => {
    const cells = columns.map((_, col) => {
      const at = row * cols + col;
      return createCell(numbers[at], shades, isMasked(at));
    });
    const heading = rowLetter ? [h("th", { scope: "row" }, names.axis(rowLetter, row))] : [];
    return h("tr", {}, ...heading, ...cells);
  });
  return h(
    "table",
    { class: "cells" },
    h("caption", { class: "unseen" }, caption),
    ...(colLetter ? [h("thead", {}, h("tr", {}, ...corner, ...headings))] : []),
    h("tbody", {}, ...lines),
  );
}

/** Formats a number with three digits, zeros at its end too: the numbers of a column are alike. */
function formatStep(value) {
  const size = Math.abs(value);
  const isPlain = size >= 1e-3 && size < 1000;
  return isPlain ? value.toPrecision(3).replace("-", "−") : formatNumber(value, 3);
}

function createCell(value, { colourOf }, isMasked) {
  if (isMasked) return h("td", { class: "masked" }, h("span", { class: "unseen" }, "masked"));
  const cell = h("td", {}, formatStep(value));
  const colour = colourOf(value);
  if (colour) {
    cell.style.background = `rgb(${colour.join(" ")})`;
    cell.style.color = isLight(colour) ? DARK_INK : "#ffffff";
  }
  return cell;
}
