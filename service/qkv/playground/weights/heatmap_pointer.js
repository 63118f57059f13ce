// Moves the cursor of a heat map by pointer and by arrow keys.

import { isTouch } from "../dom.js";

/** Describes how to read a cell, and how to choose one for an effect such as "pin its row". */
export function describeUse(effect) {
  if (isTouch) return `Tap a cell to read it${effect ? ` and to ${effect}` : ""}.`;
  return `Move the pointer or use the arrow keys.${effect ? ` Click or press Enter to ${effect}.` : ""}`;
}

/** Describes the keys alone, for screen readers. */
export const describeKeys = (effect) =>
  isTouch ? describeUse(effect) : `Arrow keys move.${effect ? ` Enter: ${effect}.` : ""}`;

/**
 * Calls `onPoint` with the cell at the cursor, and `onSelect` with the row to pin or null
 * and the chosen cell.
 *
 * @param {Object} heatmap its surface, layout, matrix, cursor and selectedRow
 * @param {{onPoint: Function, onSelect: Function}} callbacks
 */
export function listenToPointer(heatmap, callbacks) {
  const { surface } = heatmap;
  const choose = (cell) =>
    callbacks.onSelect(cell.row === heatmap.selectedRow ? null : cell.row, cell);
  surface.addEventListener("pointermove", (event) => {
    const cell = cellAt(heatmap, event);
    const isSame = cell?.row === heatmap.cursor?.row && cell?.col === heatmap.cursor?.col;
    if (!isSame) callbacks.onPoint(cell, false);
  });
  surface.addEventListener("pointerleave", () => {
    if (heatmap.cursor && document.activeElement !== surface) callbacks.onPoint(null, false);
  });
  surface.addEventListener("blur", () => callbacks.onPoint(null, false));
  surface.addEventListener("click", (event) => {
    const cell = cellAt(heatmap, event);
    if (!cell) return;
    callbacks.onPoint(cell, false);
    choose(cell);
  });
  surface.addEventListener("keydown", (event) => {
    if (!heatmap.matrix || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = heatmap.cursor ?? { row: heatmap.selectedRow ?? 0, col: 0 };
    if (event.key === "Enter" || event.key === " ") choose(at);
    else if (event.key === "Escape") {
      if (heatmap.selectedRow === null) return; // it leaves the presenter view
      callbacks.onSelect(null);
    } else {
      const target = moveCursor(
        event,
        heatmap.cursor ? at : { row: at.row, col: at.col - (event.key === "ArrowRight") },
        heatmap.matrix,
      );
      if (!target) return;
      callbacks.onPoint(target, true);
    }
    event.preventDefault();
  });
}

function moveCursor({ key, shiftKey }, { row, col }, { rows, cols }) {
  const stepSize = shiftKey ? 10 : 1;
  const page = Math.max(1, Math.floor(rows / 8));
  const target = {
    ArrowUp: [row - stepSize, col],
    ArrowDown: [row + stepSize, col],
    ArrowLeft: [row, col - stepSize],
    ArrowRight: [row, col + stepSize],
    PageUp: [row - page, col],
    PageDown: [row + page, col],
    Home: [row, 0],
    End: [row, cols - 1],
  }[key];
  if (!target) return null;
  const clamp = (at, count) => Math.min(Math.max(at, 0), count - 1);
  return { row: clamp(target[0], rows), col: clamp(target[1], cols) };
}

function cellAt({ canvas, layout, unit, matrix }, { clientX, clientY }) {
  if (!layout) return null;
  const bounds = canvas.getBoundingClientRect();
  const col = Math.floor(((clientX - bounds.left) / unit - layout.left) / layout.cellWidth);
  const row = Math.floor(((clientY - bounds.top) / unit - layout.top) / layout.cellHeight);
  if (row < 0 || col < 0 || row >= matrix.rows || col >= matrix.cols) return null;
  return { row, col };
}
