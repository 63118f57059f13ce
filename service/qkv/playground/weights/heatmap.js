// Draws a matrix as a heat map on a canvas, with a cursor for pointer and keyboard.

import { formatFixed, formatNumber, h, setText } from "../dom.js";
import { isDark } from "../theme.js";
import { createPalette, isLight, largestSize, pickColour } from "./colors.js";
import { computeLayout, drawAxes } from "./heatmap_axes.js";
import { listenToPointer } from "./heatmap_pointer.js";

const NOT_FINITE = [160, 160, 160]; // RGB of NaN and of infinity

/** A heat map in a figure. */
export class Heatmap {
  /**
   * @param {HTMLElement} figure
   * @param {Object} options
   * @param {number} options.maxHeight pixels of all cells together
   * @param {(usesRoot: boolean) => void} options.onRoot adds a control for square-root shades, which
   *   show small numbers
   * @param {boolean} options.isSmall one of several maps: small numbers, and the caption is not
   *   shown; the caller places `legend`
   * @param {(cell: {row, col}|null, byKey: boolean) => void} options.onPoint
   * @param {(row: number|null, cell: {row, col}|undefined) => void} options.onSelect called with the
   *   row to pin, and the cell that was clicked
   */
  constructor(
    figure,
    { maxHeight = 560, isSmall = false, onPoint = () => {}, onSelect = null, onRoot = null } = {},
  ) {
    this.maxHeight = maxHeight;
    this.isSmall = isSmall;
    this.usesRoot = false;
    this.hint = onSelect
      ? "Move the pointer or use the arrow keys. Click or press Enter to pin a row."
      : "Move the pointer or use the arrow keys.";
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.surface = h(
      "div",
      { class: "surface", tabindex: "0", role: "application", "aria-roledescription": "heat map" },
      this.canvas,
    );
    this.legend = h("div", { class: "legend" });
    this.readout = h("div", { class: "readout" });
    this.about = h("p", { class: "hint", hidden: true });
    this.rootCheckbox = h("input", {
      type: "checkbox",
      change: ({ target }) => {
        this.usesRoot = target.checked;
        this.repaint();
        onRoot(target.checked);
      },
    });
    const rootLabel = h("label", { class: "small" }, this.rootCheckbox, "Emphasise small weights");
    const rootToggle = onRoot ? [rootLabel] : [];
    const shades = h("div", { class: "shades" }, this.legend, ...rootToggle);
    figure.append(this.surface);
    if (!isSmall) figure.append(h("figcaption", {}, this.readout, shades, this.about));
    this.context = this.canvas.getContext("2d");
    this.cursor = null;
    this.selectedRow = null;
    listenToPointer(this, {
      onPoint: (cell, byKey) => {
        this.cursor = cell;
        this.draw();
        onPoint(cell, byKey);
      },
      onSelect: onSelect ?? (() => {}),
    });
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  /**
   * Shows a matrix.
   *
   * @param {Object} matrix
   *   rows, cols, numbers: in row-major order
   *   label: for screen readers; about: the meaning of a cell, or null
   *   rowLabels, colLabels: texts, or null; rowTick, colTick: (index) => text if there are no labels
   *   rowName, colName: (index) => name of a row or column in a sentence
   *   rowAxis, colAxis: axis titles, or null
   *   rowBars, colBars: {values, label, max}, or null
   *   scaleNumbers: the numbers that set the colour scale, if other maps share it
   */
  show(matrix) {
    this.matrix = matrix;
    const scaleNumbers = matrix.scaleNumbers ?? matrix.numbers;
    this.largest = largestSize(scaleNumbers);
    this.isSigned = scaleNumbers.some((value) => value < 0);
    this.cursor = null;
    this.showReadout(null);
    setText(this.about, matrix.about);
    this.surface.setAttribute("aria-label", matrix.label);
    this.repaint();
  }

  /** Sets square-root shades for the next matrix. */
  setRoot(usesRoot) {
    this.usesRoot = usesRoot;
    this.rootCheckbox.checked = usesRoot;
  }

  /** Redraws with the colours of the theme. */
  repaint() {
    if (!this.matrix) return;
    this.colours = createPalette(isDark());
    this.image = renderCells(this.matrix, (value) => this.colourOf(value));
    this.drawLegend();
    this.draw();
  }

  /** Returns the share of the largest number that chooses the shade of a number. */
  share(value) {
    const share = this.largest ? value / this.largest : 0;
    return this.usesRoot ? Math.sign(share) * Math.sqrt(Math.abs(share)) : share;
  }

  /** Returns the RGB of a number; null for a cell without one, which stays empty. */
  colourOf(value) {
    if (value === 0 || (this.isSmall && Number.isNaN(value))) return null;
    return Number.isFinite(value) ? pickColour(this.colours, this.share(value)) : NOT_FINITE;
  }

  /** Shows the cell at the cursor, or the hint if `text` is null. */
  showReadout(text, value = "") {
    this.readout.classList.toggle("idle", text === null);
    this.readout.replaceChildren(text ?? this.hint, " ", h("strong", {}, value));
  }

  /** Marks a cell as the one at the cursor. */
  markCell(cell) {
    this.cursor = cell;
    this.draw();
  }

  /** Marks a row as pinned. */
  markRow(row) {
    this.selectedRow = row;
    this.draw();
  }

  draw() {
    if (!this.matrix || this.isDrawScheduled) return;
    this.isDrawScheduled = true;
    requestAnimationFrame(() => {
      this.isDrawScheduled = false;
      this.render();
    });
  }

  render() {
    const { canvas, context, matrix, surface } = this;
    const width = surface.clientWidth;
    if (!width) return;
    const layout = computeLayout(context, matrix, width, this.maxHeight);
    this.layout = layout;
    const scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(layout.total * scale);
    canvas.style.height = `${layout.total}px`;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const colours = themeColours();
    context.imageSmoothingEnabled = layout.cellWidth * scale < 1;
    context.imageSmoothingQuality = "high";
    context.drawImage(this.image, layout.left, layout.top, layout.width, layout.height);
    this.drawGrid(layout, colours);
    if (this.isSmall) this.drawMissing(layout, colours);
    drawAxes(context, matrix, layout, colours, this.cursor, this.selectedRow);
    this.drawCursor(layout, colours);
  }

  /** Draws lines between large cells, and numbers in cells with enough room. */
  drawGrid({ left, top, width, height, cellWidth, cellHeight }, { card, line }) {
    const { context, matrix } = this;
    if (Math.min(cellWidth, cellHeight) >= 9) {
      context.fillStyle = card;
      for (let col = 1; col < matrix.cols; col += 1)
        context.fillRect(left + col * cellWidth - 0.5, top, 1, height);
      for (let row = 1; row < matrix.rows; row += 1)
        context.fillRect(left, top + row * cellHeight - 0.5, width, 1);
    }
    context.strokeStyle = line;
    context.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);
    const [size, least] = this.isSmall ? [11, 27] : [13, 40];
    if (cellWidth < least || cellHeight < 1.5 * size) return;
    context.font = `${size}px system-ui, -apple-system, 'Segoe UI', sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    matrix.numbers.forEach((value, at) => {
      const colour = this.colourOf(value);
      if (!colour) return;
      context.fillStyle = isLight(colour) ? "#0b111a" : "#ffffff";
      const [row, col] = [Math.floor(at / matrix.cols), at % matrix.cols];
      context.fillText(
        formatCell(value),
        left + (col + 0.5) * cellWidth,
        top + (row + 0.5) * cellHeight,
      );
    });
  }

  /** Draws a dash in each cell without a number. */
  drawMissing({ left, top, cellWidth, cellHeight }, { muted }) {
    const { context, matrix } = this;
    const width = Math.min(6, cellWidth / 2);
    context.fillStyle = muted;
    matrix.numbers.forEach((value, at) => {
      if (!Number.isNaN(value)) return;
      const [row, col] = [Math.floor(at / matrix.cols), at % matrix.cols];
      const x = left + (col + 0.5) * cellWidth - width / 2;
      context.fillRect(x, top + (row + 0.5) * cellHeight - 0.5, width, 1);
    });
  }

  /** Draws the outline of the pinned row and the cross of the cursor. */
  drawCursor({ left, top, width, height, cellWidth, cellHeight }, { ink, accent }) {
    const { context, cursor, selectedRow } = this;
    if (selectedRow !== null && selectedRow < this.matrix.rows) {
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

  /** Draws the colour scale with the smallest and the largest number. */
  drawLegend() {
    const steps = 64;
    const strip = h("canvas", { width: steps, height: 1, "aria-hidden": "true" });
    const context = strip.getContext("2d");
    const lowest = this.isSigned ? -1 : 0;
    for (let i = 0; i < steps; i += 1) {
      const share = lowest + ((1 - lowest) * i) / (steps - 1);
      context.fillStyle = `rgb(${pickColour(this.colours, share).join(" ")})`;
      context.fillRect(i, 0, 1, 1);
    }
    const low = this.isSigned ? formatNumber(-this.largest, 3) : "0";
    const high = formatNumber(this.largest, 3);
    this.legend.replaceChildren(h("span", {}, low), strip, h("span", {}, high));
  }
}

/** Renders the cells, one pixel each; a cell without a colour stays empty. */
function renderCells({ rows, cols, numbers }, colourOf) {
  const canvas = h("canvas", { width: cols, height: rows });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(cols, rows);
  numbers.forEach((value, at) => {
    const colour = colourOf(value);
    if (colour) pixels.data.set([...colour, 255], 4 * at);
  });
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** Draws a thumbnail: the cells alone. */
export function drawThumbnail(matrix) {
  const largest = largestSize(matrix.numbers) || 1;
  const palette = createPalette(isDark());
  return renderCells(matrix, (value) => {
    if (value === 0) return null;
    return Number.isFinite(value) ? pickColour(palette, value / largest) : NOT_FINITE;
  });
}

const formatCell = (value) => {
  const text = formatFixed(value, Math.abs(value) >= 10 ? 1 : 2);
  return /^−?0\.00$/.test(text) ? "·" : text.replace(/^(−?)0\./, "$1.");
};

function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "muted", "line", "card", "accent", "bar"];
  return Object.fromEntries(
    names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]),
  );
}
