// Shows a matrix as a heat map, with a cursor for pointer and keyboard, and a menu to save it.

import { h, setText } from "../dom.js";
import { createTerm } from "../glossary.js";
import { createSaveMenu } from "../keep/save_menu.js";
import { isDark, readColours, readUnit } from "../theme.js";
import { createShades } from "./colors.js";
import { computeLayout, fitLayout } from "./heatmap_axes.js";
import {
  drawHeatmap,
  drawScale,
  renderCells,
  renderScale,
  SCALE_HEIGHT,
} from "./heatmap_drawing.js";
import { describeKeys, describeUse, listenToPointer } from "./heatmap_pointer.js";

/** A heat map in a figure. */
export class Heatmap {
  /**
   * @param {HTMLElement} figure
   * @param {Object} options
   * @param {number} options.maxHeight pixels of all cells together, unless CSS limits the surface
   * @param {(usesRoot: boolean) => void} options.onRoot adds a control for square-root shades, which
   *   show small numbers
   * @param {string} options.name of the map, for screen readers
   * @param {boolean} options.isSmall one of several maps: small numbers, and the caption is not
   *   shown; the caller places `legend` and `saveMenu`
   * @param {(cell: {row, col}|null, byKey: boolean) => void} options.onPoint
   * @param {(row: number|null, cell: {row, col}|undefined) => void} options.onSelect called with the
   *   row to pin, and the cell that was clicked
   * @param {string} options.effect of `onSelect`, such as "pin its row"
   */
  constructor(
    figure,
    {
      name,
      maxHeight = 560,
      isSmall = false,
      effect = null,
      onPoint = () => {},
      onSelect = () => {},
      onRoot = null,
    },
  ) {
    this.maxHeight = maxHeight;
    this.isSmall = isSmall;
    this.usesRoot = false;
    this.hint = describeUse(effect);
    this.keys = describeKeys(effect);
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
    this.saveMenu = createSaveMenu(name, () => this.describe());
    this.saveMenu.hidden = true; // until there is a matrix
    const shades = h("div", { class: "shades" }, this.legend, ...rootToggle, this.saveMenu);
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
      onSelect,
    });
    // the map itself changes the height of the figure, which is no reason to draw it again
    new ResizeObserver(() => this.measureRoom().key !== this.roomKey && this.draw()).observe(figure);
  }

  /**
   * Shows a matrix.
   *
   * @param {Object} matrix
   *   rows, cols, numbers: in row-major order
   *   label: for screen readers; about: the meaning of a cell, or null
   *   title: of the saved map; tensors: to save with it, or undefined
   *   rowLabels, colLabels: texts, or null; rowTick, colTick: (index) => text if there are no labels
   *   rowName, colName: (index) => name of a row or column in a sentence
   *   rowAxis, colAxis: axis titles, or null
   *   rowBars, colBars: {values, label, max}, or null
   *   masked: 1 for each cell whose number does not exist, or null
   *   decimals: of the numbers in cells, 2 if undefined
   *   chosen: {row, col} of a cell with an outline, or undefined
   *   scaleNumbers: the numbers that set the colour scale, if other maps share it
   */
  show(matrix) {
    this.matrix = matrix;
    this.cursor = null;
    this.showReadout(null);
    setText(this.about, matrix.about);
    this.saveMenu.hidden = false;
    this.surface.setAttribute("aria-label", `${matrix.label} ${this.keys}`);
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
    this.shades = this.createShades(isDark());
    this.image = renderCells(this.matrix, this.shades);
    const { low, strip, high } = renderScale(this.shades);
    const masked = this.matrix.masked
      ? [h("span", { class: "hatch", "aria-hidden": "true" }), createTerm("masked")]
      : [];
    this.legend.replaceChildren(h("span", {}, low), strip, h("span", {}, high), ...masked);
    this.draw();
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

  /** Measures what the drawing depends on: the width, a height that CSS limits, and the unit. */
  measureRoom() {
    const { surface } = this;
    const [width, unit] = [surface.clientWidth, readUnit()];
    const isBounded = getComputedStyle(surface).getPropertyValue("--is-bounded");
    const height = isBounded ? surface.clientHeight : null;
    return { width, height, unit, key: [width, height, unit, devicePixelRatio].join() };
  }

  render() {
    const { canvas, context } = this;
    const { width, height, unit, key } = this.measureRoom();
    this.roomKey = width ? key : null; // in a folded section: drawn when it is unfolded
    if (!width) return;
    const layout = this.layOut(width / unit, height && height / unit);
    this.unit = unit;
    const scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(layout.total * unit * scale);
    canvas.style.height = `${layout.total * unit}px`;
    context.setTransform(scale * unit, 0, 0, scale * unit, 0, 0);
    drawHeatmap(context, this, layout, readColours());
  }

  /** Returns the layout for a size in units; the last one if nothing has changed. */
  layOut(width, height) {
    const { context, matrix, maxHeight } = this;
    const key = [width, height].join();
    if (this.layout?.matrix !== matrix || this.layout.key !== key) {
      const layout = height
        ? fitLayout(context, matrix, width, height)
        : computeLayout(context, matrix, width, maxHeight);
      this.layout = { ...layout, matrix, key };
    }
    return this.layout;
  }

  /** Describes the map for the menu that saves it. */
  describe() {
    const { matrix, maxHeight, isSmall, selectedRow } = this;
    const picture = (context, width) => {
      const layout = computeLayout(context, matrix, width, maxHeight);
      const shades = this.createShades(false);
      const map = { matrix, shades, isSmall, selectedRow, cursor: null };
      const draw = (colours) => {
        drawHeatmap(context, { ...map, image: renderCells(matrix, shades) }, layout, colours);
        drawScale(context, map, layout, colours);
      };
      return { height: layout.total + SCALE_HEIGHT, draw };
    };
    return { title: matrix.title, table: tableOf(matrix), tensors: matrix.tensors, picture };
  }

  /** Creates the shades of the numbers, for a theme. */
  createShades(isDarkTheme) {
    const { matrix, usesRoot, isSmall } = this;
    const options = { isDark: isDarkTheme, usesRoot, hasGaps: isSmall };
    return createShades(matrix.scaleNumbers ?? matrix.numbers, options);
  }
}

/** Returns the numbers with the names of their rows and columns. */
function tableOf({ rows, cols, numbers, rowName, colName, rowAxis }) {
  const names = Array.from({ length: cols }, (_, col) => colName(col));
  const lines = Array.from({ length: rows }, (_, row) => [
    rowName(row),
    ...numbers.subarray(row * cols, (row + 1) * cols),
  ]);
  return { headings: [rowAxis ?? "row", ...names], rows: lines };
}

/** Draws a thumbnail: the cells alone. */
export const drawThumbnail = (matrix) =>
  renderCells(matrix, createShades(matrix.numbers, { isDark: isDark() }));
