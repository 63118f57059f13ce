// Draws a heat map on a canvas: its cells, their numbers, and what is marked.

import { formatFixed, formatNumber, h } from "../dom.js";
import { SANS } from "../theme.js";
import { isLight } from "./colors.js";
import { drawAxes } from "./heatmap_axes.js";
import { hatch, hatchMasked } from "./masked_cells.js";

const STRIP_SHADES = 64; // of the colour scale
const FONT = `12px ${SANS}`;
const MIN_NUMBER_PX = 20; // width of a cell with a number, pixels

/** Room for the colour scale below a map, in pixels. */
export const SCALE_HEIGHT = 36;

/**
 * Draws a heat map.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {Object} map
 *   matrix: as for `Heatmap.show`
 *   image: its cells from `renderCells`
 *   shades: from `createShades`
 *   isSmall: small numbers, and a dash in cells without a number
 *   cursor: {row, col} or null; selectedRow: index or null
 * @param {Object} layout from `computeLayout`
 * @param {Object} colours by the names of the theme
 */
export function drawHeatmap(context, map, layout, colours) {
  const { left, top, width, height } = layout;
  context.imageSmoothingEnabled = layout.cellWidth * context.getTransform().a < 1;
  context.imageSmoothingQuality = "high";
  context.drawImage(map.image, left, top, width, height);
  drawLines(context, map.matrix, layout, colours);
  if (map.matrix.masked) hatchMasked(context, map.matrix, layout, colours);
  drawNumbers(context, map, layout);
  if (map.isSmall) drawMissing(context, map.matrix, layout, colours);
  drawAxes(context, map.matrix, layout, colours, map.cursor, map.selectedRow);
  drawMarks(context, map, layout, colours);
}

/** Renders the cells, one pixel each; a cell without a colour stays empty. */
export function renderCells({ rows, cols, numbers }, { colourOf }) {
  const canvas = h("canvas", { width: cols, height: rows });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(cols, rows);
  const { data } = pixels;
  numbers.forEach((value, index) => {
    const colour = colourOf(value);
    if (!colour) return;
    const at = 4 * index; // one by one: arrays for 512 x 512 cells take 60 ms
    data[at] = colour[0];
    data[at + 1] = colour[1];
    data[at + 2] = colour[2];
    data[at + 3] = 255;
  });
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** Returns the colour scale as a canvas of one line, with its smallest and its largest number. */
export function renderScale({ isSigned, largest, pick }) {
  const strip = h("canvas", { width: STRIP_SHADES, height: 1, "aria-hidden": "true" });
  const context = strip.getContext("2d");
  const lowest = isSigned ? -1 : 0;
  for (let i = 0; i < STRIP_SHADES; i += 1) {
    const share = lowest + ((1 - lowest) * i) / (STRIP_SHADES - 1);
    context.fillStyle = `rgb(${pick(share).join(" ")})`;
    context.fillRect(i, 0, 1, 1);
  }
  const low = isSigned ? formatNumber(-largest, 3) : "0";
  return { low, strip, high: formatNumber(largest, 3) };
}

/** Draws the colour scale below a map, and how it shows masked cells if it has some. */
export function drawScale(context, { shades, matrix }, { left, total }, { muted, line }) {
  const { low, strip, high } = renderScale(shades);
  const [width, height, y] = [128, 10, total + 16];
  context.font = FONT;
  context.fillStyle = muted;
  context.strokeStyle = line;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(low, left, y + height / 2);
  const start = left + context.measureText(low).width + 8;
  context.drawImage(strip, start, y, width, height);
  context.strokeRect(start - 0.5, y - 0.5, width + 1, height + 1);
  const end = start + width + 8;
  context.fillText(high, end, y + height / 2);
  if (!matrix.masked) return;
  const swatch = [end + context.measureText(high).width + 24, y, 22, height];
  hatch(context, swatch, muted);
  context.strokeRect(swatch[0] - 0.5, y - 0.5, swatch[2] + 1, height + 1);
  context.fillText("masked", swatch[0] + swatch[2] + 8, y + height / 2);
}

/** Draws lines between large cells, and a frame. */
function drawLines(context, { rows, cols }, layout, { card, line }) {
  const { left, top, width, height, cellWidth, cellHeight } = layout;
  if (Math.min(cellWidth, cellHeight) >= 9) {
    context.fillStyle = card;
    for (let col = 1; col < cols; col += 1)
      context.fillRect(left + col * cellWidth - 0.5, top, 1, height);
    for (let row = 1; row < rows; row += 1)
      context.fillRect(left, top + row * cellHeight - 0.5, width, 1);
  }
  context.strokeStyle = line;
  context.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);
}

/** Draws the numbers of cells with enough room. */
function drawNumbers(context, { matrix, shades, isSmall }, layout) {
  const { left, top, cellWidth, cellHeight } = layout;
  if (cellWidth < MIN_NUMBER_PX || cellHeight < MIN_NUMBER_PX / 2) return;
  const texts = Array.from(matrix.numbers, (value) => formatCell(value, matrix.decimals));
  const longest = texts.reduce((one, text) => (text.length > one.length ? text : one), "");
  const sizes = isSmall ? [11] : layout.stretch > 1 ? [18, 15, 13, 11] : [13, 11];
  const size = sizes.find((px) => {
    context.font = `${px}px ${SANS}`;
    return context.measureText(longest).width + 6 <= cellWidth && 1.5 * px <= cellHeight;
  });
  if (!size) return;
  context.textAlign = "center";
  context.textBaseline = "middle";
  matrix.numbers.forEach((value, at) => {
    const colour = shades.colourOf(value);
    if (!colour) return;
    context.fillStyle = isLight(colour) ? "#0b111a" : "#ffffff";
    const [row, col] = [Math.floor(at / matrix.cols), at % matrix.cols];
    context.fillText(texts[at], left + (col + 0.5) * cellWidth, top + (row + 0.5) * cellHeight);
  });
}

/** Draws a dash in each cell without a number. */
function drawMissing(context, matrix, { left, top, cellWidth, cellHeight }, { muted }) {
  const width = Math.min(6, cellWidth / 2);
  context.fillStyle = muted;
  matrix.numbers.forEach((value, at) => {
    if (!Number.isNaN(value)) return;
    const [row, col] = [Math.floor(at / matrix.cols), at % matrix.cols];
    const x = left + (col + 0.5) * cellWidth - width / 2;
    context.fillRect(x, top + (row + 0.5) * cellHeight - 0.5, width, 1);
  });
}

/** Draws the outlines of the pinned row and of the chosen cell, and the cross of the cursor. */
function drawMarks(context, { matrix, cursor, selectedRow }, layout, { ink, accent }) {
  const { left, top, width, height, cellWidth, cellHeight } = layout;
  if (matrix.chosen) {
    const { row, col } = matrix.chosen;
    const [x, y] = [left + col * cellWidth, top + row * cellHeight];
    context.strokeStyle = accent;
    context.lineWidth = 3;
    context.strokeRect(x - 1, y - 1, Math.max(cellWidth, 2) + 2, Math.max(cellHeight, 2) + 2);
  }
  if (selectedRow !== null && selectedRow < matrix.rows) {
    context.strokeStyle = accent;
    context.lineWidth = 2;
    context.strokeRect(
      left - 1,
      top + selectedRow * cellHeight - 1,
      width + 2,
      Math.max(cellHeight, 2) + 2,
    );
  }
  if (cursor) {
    const [x, y] = [left + cursor.col * cellWidth, top + cursor.row * cellHeight];
    context.fillStyle = ink;
    context.globalAlpha = 0.35;
    for (const at of [y - 0.5, y + cellHeight - 0.5]) context.fillRect(left, at, width, 1);
    for (const at of [x - 0.5, x + cellWidth - 0.5]) context.fillRect(at, top, 1, height);
    context.globalAlpha = 1;
    context.strokeStyle = ink;
    context.lineWidth = 1.5;
    context.strokeRect(x, y, Math.max(cellWidth, 3), Math.max(cellHeight, 3));
  }
  context.lineWidth = 1;
}

const formatCell = (value, decimals = 2) => {
  const text = formatFixed(value, Math.abs(value) >= 10 ? 1 : decimals);
  return /^−?0\.0+$/.test(text) ? "·" : text.replace(/^(−?)0\./, "$1.");
};
