// A matrix as a heat map on a canvas, which a pointer or the arrow keys go about on.

import { fixed, h, number, say } from "./dom.js";
import { drawFrame, frame } from "./frame.js";
import { isLight, palette, shade } from "./palette.js";
import { pointing } from "./pointing.js";
import { isDark } from "./theme.js";

/** The heat map in a figure. */
export class Matrix {
  /**
   * @param {HTMLElement} figure
   * @param {Object} options
   * @param {number} options.most pixels that the cells may take from top to bottom
   * @param {boolean} options.hasRoot whether shades may go by the root, so that small numbers show
   * @param {(cell: {row, col}|null, byKey: boolean) => void} options.pointed
   * @param {(row: number|null) => void} options.held
   */
  constructor(figure, { most = 560, hasRoot = false, pointed = () => {}, held = null } = {}) {
    this.most = most;
    this.root = false;
    this.hint = held
      ? "Point at a cell, or use the arrow keys; a click or Enter holds its row."
      : "Point at a cell, or use the arrow keys.";
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.surface = h(
      "div",
      { class: "surface", tabindex: "0", role: "application", "aria-roledescription": "heat map" },
      this.canvas,
    );
    this.legend = h("div", { class: "legend" });
    this.readout = h("div", { class: "readout" });
    this.about = h("p", { class: "hint", hidden: true });
    const root = h("input", {
      type: "checkbox",
      change: () => {
        this.root = root.checked;
        this.paint();
      },
    });
    const small = hasRoot ? [h("label", { class: "small" }, root, "Bring out small weights")] : [];
    figure.append(
      this.surface,
      h(
        "figcaption",
        {},
        this.readout,
        h("div", { class: "shades" }, this.legend, ...small),
        this.about,
      ),
    );
    this.context = this.canvas.getContext("2d");
    this.mark = null;
    this.held = null;
    pointing(this, {
      pointed: (cell, byKey) => {
        this.mark = cell;
        this.draw();
        pointed(cell, byKey);
      },
      held: held ?? (() => {}),
    });
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  /**
   * Shows a matrix.
   *
   * @param {Object} shown
   *   rows, cols, numbers: row by row
   *   label: what it is, for who hears it; about: what a cell is, where that needs saying
   *   rowLabels, colLabels: words, or null; rowTick, colTick: (index) => text where there are none
   *   rowName, colName: (index) => what a row or column is called in a sentence
   *   rowAxis, colAxis: what rows and columns are, or null
   *   rowBars, colBars: {values, label, most}, or null
   */
  show(shown) {
    this.shown = shown;
    this.largest = 0;
    this.isSigned = false;
    for (const value of shown.numbers) {
      if (Math.abs(value) > this.largest && Number.isFinite(value)) this.largest = Math.abs(value);
      if (value < 0) this.isSigned = true;
    }
    this.mark = null;
    this.readOut(null);
    say(this.about, shown.about);
    this.surface.setAttribute("aria-label", shown.label);
    this.paint();
  }

  /** Draws anew what changes with the theme. */
  paint() {
    if (!this.shown) return;
    this.colours = palette(isDark());
    this.image = image(this.shown, (value) => this.share(value), this.colours);
    this.describe();
    this.draw();
  }

  /** The share of the largest number that a number is drawn as. */
  share(value) {
    const share = this.largest ? value / this.largest : 0;
    return this.root ? Math.sign(share) * Math.sqrt(Math.abs(share)) : share;
  }

  /** Says what is pointed at, or how to. */
  readOut(text, value = "") {
    this.readout.classList.toggle("idle", text === null);
    this.readout.replaceChildren(text ?? this.hint, " ", h("strong", {}, value));
  }

  /** Marks a row as held. */
  hold(row) {
    this.held = row;
    this.draw();
  }

  draw() {
    if (!this.shown || this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.now();
    });
  }

  now() {
    const { canvas, context, shown, surface } = this;
    const width = surface.clientWidth;
    if (!width) return;
    const place = frame(context, shown, width, this.most);
    this.place = place;
    const scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(place.total * scale);
    canvas.style.height = `${place.total}px`;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const colours = inks();
    context.imageSmoothingEnabled = place.cellWidth * scale < 1;
    context.imageSmoothingQuality = "high";
    context.drawImage(this.image, place.left, place.top, place.width, place.height);
    this.grid(place, colours);
    drawFrame(context, shown, place, colours, this.mark, this.held);
    this.marks(place, colours);
  }

  /** Lines between cells that are large enough, and numbers in those that have room. */
  grid({ left, top, width, height, cellWidth, cellHeight }, { card, line }) {
    const { context, shown } = this;
    if (Math.min(cellWidth, cellHeight) >= 9) {
      context.fillStyle = card;
      for (let col = 1; col < shown.cols; col += 1)
        context.fillRect(left + col * cellWidth - 0.5, top, 1, height);
      for (let row = 1; row < shown.rows; row += 1)
        context.fillRect(left, top + row * cellHeight - 0.5, width, 1);
    }
    context.strokeStyle = line;
    context.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);
    if (cellWidth < 40 || cellHeight < 20) return;
    context.font = "13px system-ui, -apple-system, 'Segoe UI', sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    shown.numbers.forEach((value, at) => {
      if (!value) return;
      const light = isLight(shade(this.colours, this.share(value)));
      context.fillStyle = light ? "#0b111a" : "#ffffff";
      const [row, col] = [Math.floor(at / shown.cols), at % shown.cols];
      context.fillText(
        brief(value),
        left + (col + 0.5) * cellWidth,
        top + (row + 0.5) * cellHeight,
      );
    });
  }

  /** The held row, and the cross of what is pointed at. */
  marks({ left, top, width, height, cellWidth, cellHeight }, { ink, accent }) {
    const { context, mark, held } = this;
    if (held !== null && held < this.shown.rows) {
      context.strokeStyle = accent;
      context.lineWidth = 2;
      context.strokeRect(
        left - 1,
        top + held * cellHeight - 1,
        width + 2,
        Math.max(cellHeight, 2) + 2,
      );
    }
    if (mark) {
      const [x, y] = [left + mark.col * cellWidth, top + mark.row * cellHeight];
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

  /** The scale of shades, with numbers at its ends. */
  describe() {
    const steps = 64;
    const strip = h("canvas", { width: steps, height: 1, "aria-hidden": "true" });
    const context = strip.getContext("2d");
    const least = this.isSigned ? -1 : 0;
    for (let i = 0; i < steps; i += 1) {
      const share = least + ((1 - least) * i) / (steps - 1);
      context.fillStyle = `rgb(${shade(this.colours, share).join(" ")})`;
      context.fillRect(i, 0, 1, 1);
    }
    const low = this.isSigned ? number(-this.largest, 3) : "0";
    this.legend.replaceChildren(h("span", {}, low), strip, h("span", {}, number(this.largest, 3)));
  }
}

/** The cells, one pixel each; what is exactly 0 is left empty. */
function image({ rows, cols, numbers }, share, colours) {
  const canvas = h("canvas", { width: cols, height: rows });
  const context = canvas.getContext("2d");
  const data = context.createImageData(cols, rows);
  numbers.forEach((value, at) => {
    if (!value) return;
    const [red, green, blue] = Number.isFinite(value)
      ? shade(colours, share(value))
      : [160, 160, 160];
    data.data.set([red, green, blue, 255], 4 * at);
  });
  context.putImageData(data, 0, 0);
  return canvas;
}

/** A thumbnail of a matrix: its cells alone. */
export function thumbnail(shown) {
  const most = shown.numbers.reduce((largest, value) => Math.max(largest, Math.abs(value)), 0) || 1;
  return image(shown, (value) => value / most, palette(isDark()));
}

const brief = (value) => {
  const text = fixed(value, Math.abs(value) >= 10 ? 1 : 2);
  return /^−?0\.00$/.test(text) ? "·" : text.replace(/^(−?)0\./, "$1.");
};

function inks() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "muted", "line", "card", "accent", "bar"];
  return Object.fromEntries(
    names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]),
  );
}
