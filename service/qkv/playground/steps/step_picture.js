// Draws all rows of a step as a small picture.

import { h } from "../dom.js";
import { isDark, readColours } from "../theme.js";

const WIDTH = 132; // pixels, at most
const HEIGHT = 108; // pixels, at most
const MAX_CELL = 18; // pixels
const HATCH_GAP = 4; // pixels between the lines of a masked cell

/**
 * Draws a matrix.
 *
 * @param {{rows: number, cols: number}} size
 * @param {Float64Array} numbers in row-major order
 * @param {(value: number) => number[]|null} colourOf from `createShades`
 * @param {(at: number) => boolean} isMasked
 * @returns {{canvas: HTMLCanvasElement, rowHeight: number}} `rowHeight`: in pixels
 */
export function drawPicture({ rows, cols }, numbers, colourOf, isMasked) {
  const cell = Math.min(MAX_CELL, WIDTH / cols, HEIGHT / rows);
  const high = Math.max(cell, Math.min(HEIGHT / rows, 4)); // wide matrices stay visible
  const [width, height] = [cols * cell, rows * high];
  const scale = devicePixelRatio || 1;
  const canvas = h("canvas", { role: "img", width: width * scale, height: height * scale });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  const { line, muted } = readColours();
  context.setTransform(scale, 0, 0, scale, 0, 0);
  numbers.forEach((value, at) => {
    const [x, y] = [(at % cols) * cell, Math.floor(at / cols) * high];
    if (isMasked(at)) return drawHatch(context, [x, y, cell, high], muted);
    const colour = colourOf(value);
    if (!colour) return;
    context.fillStyle = `rgb(${colour.join(" ")})`;
    context.fillRect(x, y, Math.max(cell - gapOf(cell), 1), Math.max(high - gapOf(high), 1));
  });
  context.lineWidth = 1;
  context.strokeStyle = line;
  context.strokeRect(0.5, 0.5, width - 1, height - 1);
  return { canvas, rowHeight: high };
}

/** Returns the space between cells, if they are large enough for one. */
const gapOf = (size) => (size >= 9 ? 1 : 0);

function drawHatch(context, [x, y, width, height], colour) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.beginPath();
  for (let from = -height; from < width; from += HATCH_GAP) {
    context.moveTo(x + from, y + height);
    context.lineTo(x + from + height, y);
  }
  context.strokeStyle = colour;
  context.globalAlpha = isDark() ? 0.5 : 0.45;
  context.lineWidth = 1;
  context.stroke();
  context.restore();
}
