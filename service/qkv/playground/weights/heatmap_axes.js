// Lays out a heat map; draws its row and column names, axis titles and bars.

import { SANS } from "../theme.js";

const FONT = `12px ${SANS}`;
const MIN_NAME_PX = 11; // height of a name, pixels
const STRETCH = 1.6; // of a drawing in a place of limited height
const MAX_CELL_PX = 110; // pixels
const THIN_CELL_PX = 4; // pixels; bars of thinner cells touch and show an outline
const TIP_PX = 3; // thickness of the outline, pixels
const MAX_BAR_PX = 12; // pixels

/**
 * Computes the layout of a drawing that is not higher than its place.
 *
 * @param {number} maxTotal of the drawing with its names and bars, in pixels
 */
export function fitLayout(context, matrix, width, maxTotal) {
  let layout = computeLayout(context, matrix, width, maxTotal, STRETCH);
  for (let i = 0; i < 2 && layout.total > maxTotal; i += 1) {
    const maxHeight = layout.height + maxTotal - layout.total;
    layout = computeLayout(context, matrix, width, maxHeight, STRETCH);
  }
  return layout; // names that rotate in smaller cells need more room: hence twice
}

/**
 * Computes the layout, in pixels of a page with a font of 15 pixels.
 *
 * @param {CanvasRenderingContext2D} context measures text
 * @param {Object} matrix as for `Heatmap.show`
 * @param {number} width of the canvas
 * @param {number} maxHeight of all cells together
 * @param {number} stretch width of a cell by its height, at most
 */
export function computeLayout(context, matrix, width, maxHeight, stretch = 1) {
  context.font = FONT;
  const widest = (names) => Math.max(...names.map((name) => context.measureText(name).width));
  const isNarrow = width < 480;
  const bars = isNarrow ? 30 : 48;
  const maxNameWidth = isNarrow ? 64 : 110;
  const elideAll = (names) => names?.map((name) => elide(context, name, maxNameWidth));
  const [rowNames, colNames] = [elideAll(matrix.rowLabels), elideAll(matrix.colLabels)];
  const left = (rowNames ? widest(rowNames) : 28) + 12 + (matrix.rowAxis ? 20 : 0);
  const end = colNames ? 0.72 * context.measureText(colNames.at(-1)).width : 0;
  const right = Math.max(matrix.rowBars ? bars + 12 : 4, end); // room for the last name if it is rotated
  const ratio = matrix.rows / matrix.cols;
  // cells are square unless the matrix would become a strip
  const fitting = ratio > 0.4 && ratio < 2.5 ? (stretch * maxHeight) / ratio : Infinity;
  const cellsWide = Math.max(
    Math.min(width - left - right, matrix.cols * MAX_CELL_PX, fitting),
    40,
  );
  const colWidest = colNames ? widest(colNames) : 24;
  const angle = colNames ? nameAngle(cellsWide / matrix.cols, colWidest) : 0;
  const namesSize = angle ? colWidest * Math.sin(angle) + 10 : 14;
  const top = namesSize + 8 + (matrix.colAxis ? 20 : 0);
  const cellsHigh = Math.round(Math.min(cellsWide * ratio, maxHeight));
  const high = stretch > 1 ? cellsHigh : Math.max(cellsHigh, Math.min(matrix.rows * 22, 120));
  return {
    left,
    top,
    width: cellsWide,
    height: high,
    cellWidth: cellsWide / matrix.cols,
    cellHeight: high / matrix.rows,
    rowNames,
    colNames,
    stretch,
    bars,
    angle,
    total: top + high + (matrix.colBars ? bars + 34 : 6),
  };
}

/** Returns a text that fits a width: its beginning and … if it is too long. */
function elide(context, text, width) {
  const fits = (part) => context.measureText(part).width <= width;
  if (fits(text)) return text;
  const letters = [...text];
  let [least, most] = [0, letters.length]; // so many letters fit, and do not
  while (most - least > 1) {
    const middle = Math.floor((least + most) / 2);
    if (fits(`${letters.slice(0, middle).join("")}…`)) least = middle;
    else most = middle;
  }
  return `${letters.slice(0, least).join("")}…`;
}

/** Returns the smallest rotation at which column names do not overlap. */
function nameAngle(cellWidth, widest) {
  if (cellWidth >= widest + 8) return 0;
  return cellWidth < 17 ? Math.PI / 2 : Math.PI / 4;
}

/** Draws names, axis titles and bars; `cursor` has the row and column at the pointer. */
export function drawAxes(context, matrix, layout, colours, cursor, selectedRow) {
  context.font = FONT;
  drawAxisTitles(context, matrix, layout, colours);
  drawRowNames(context, matrix, layout, colours, cursor?.row, selectedRow);
  drawColumnNames(context, matrix, layout, colours, cursor?.col);
  if (matrix.rowBars)
    drawRowBars(context, matrix.rowBars, layout, colours, cursor?.row, selectedRow);
  if (matrix.colBars) drawColumnBars(context, matrix.colBars, layout, colours, cursor?.col);
}

function drawAxisTitles(context, matrix, { left, top, width, height }, { muted }) {
  context.fillStyle = muted;
  context.textAlign = "center";
  context.textBaseline = "middle";
  if (matrix.colAxis) context.fillText(matrix.colAxis, left + width / 2, 9);
  if (matrix.rowAxis) {
    context.save();
    context.translate(9, top + height / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(matrix.rowAxis, 0, 0);
    context.restore();
  }
}

function drawRowNames(context, matrix, layout, colours, at, selectedRow) {
  context.textAlign = "right";
  context.textBaseline = "middle";
  const { left, top, cellHeight, rowNames } = layout;
  const { rows, rowTick } = matrix;
  for (const [row, name] of visibleNames(rowNames, rowTick, rows, cellHeight, 26)) {
    setEmphasis(context, colours, row === selectedRow, row === at);
    context.fillText(
      name,
      left - 8,
      top + (row + 0.5) * cellHeight,
      left - (matrix.rowAxis ? 30 : 10),
    );
  }
}

function drawColumnNames(context, matrix, layout, colours, at) {
  context.textBaseline = "middle";
  const { left, top, cellWidth, angle, colNames } = layout;
  const { cols, colTick } = matrix;
  for (const [col, name] of visibleNames(colNames, colTick, cols, cellWidth, 40)) {
    setEmphasis(context, colours, false, col === at);
    const x = left + (col + 0.5) * cellWidth;
    context.save();
    context.translate(x, top - 10);
    context.rotate(-angle);
    context.textAlign = angle ? "left" : "center";
    context.fillText(name, 0, 0, 110);
    context.restore();
  }
}

/** Returns the indices and names to draw: all if they fit, otherwise every 2nd, 4th, 8th ... */
function visibleNames(labels, name, count, size, minGap) {
  const step = labels && size >= MIN_NAME_PX ? 1 : tickStep(minGap / size);
  const visible = [];
  for (let i = 0; i < count; i += step) visible.push([i, labels ? labels[i] : name(i)]);
  return visible;
}

/** Returns the next power of two. */
function tickStep(least) {
  if (least <= 1) return 1;
  for (let step = 2; ; step *= 2) if (step >= least) return step;
}

function setEmphasis(context, { ink, muted, accent }, isSelected, isPointed) {
  context.fillStyle = isSelected ? accent : isPointed ? ink : muted;
  context.font = isSelected || isPointed ? `600 ${FONT}` : FONT;
}

function drawRowBars(context, { values, label, max }, layout, colours, at, selectedRow) {
  const { left, top, width, height, cellHeight, bars } = layout;
  const x = left + width + 12;
  drawCaption(context, colours, label, x + bars, 9, "right");
  const barSize = barThickness(cellHeight);
  values.forEach((value, row) => {
    const isMarked = row === selectedRow || row === at;
    const size = Math.max(max > 0 ? (bars * value) / max : 0, 0.5);
    const y = top + (row + 0.5) * cellHeight - barSize / 2;
    const tip = isMarked || cellHeight >= THIN_CELL_PX ? size : Math.min(size, TIP_PX);
    context.fillStyle = colours.line;
    context.fillRect(x, y, size - tip, barSize);
    const markedColour = row === selectedRow ? colours.accent : colours.ink;
    context.fillStyle = isMarked ? markedColour : colours.bar;
    context.fillRect(x + size - tip, y, tip, barSize);
  });
  context.fillStyle = colours.line;
  context.fillRect(x - 1, top, 1, height);
}

function drawColumnBars(context, { values, label, max }, layout, colours, at) {
  const { left, top, width, height, cellWidth, bars } = layout;
  const y = top + height + 12;
  const barSize = barThickness(cellWidth);
  values.forEach((value, col) => {
    const size = Math.max(max > 0 ? (bars * Math.abs(value)) / max : 0, 0.5);
    const x = left + (col + 0.5) * cellWidth - barSize / 2;
    const tip = col === at || cellWidth >= THIN_CELL_PX ? size : Math.min(size, TIP_PX);
    context.fillStyle = colours.line;
    context.fillRect(x, y, barSize, size - tip);
    context.fillStyle = col === at ? colours.ink : colours.bar;
    context.fillRect(x, y + size - tip, barSize, tip);
  });
  context.fillStyle = colours.line;
  context.fillRect(left, y - 1, width, 1);
  drawCaption(context, colours, label, left, y + bars + 13, "left");
}

/** Returns the thickness of a bar; bars that touch overlap, so that no seams show. */
const barThickness = (cell) =>
  cell < THIN_CELL_PX ? cell + 0.7 : Math.min(cell * 0.7, MAX_BAR_PX);

function drawCaption(context, { muted }, label, x, y, align) {
  context.fillStyle = muted;
  context.font = FONT;
  context.textAlign = align;
  context.textBaseline = "middle";
  context.fillText(label, x, y);
}
