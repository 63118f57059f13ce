// Tells the cell at the cursor of a heat map.

import { formatNumber } from "../dom.js";

/**
 * Creates a function that shows a cell below its heat map, and announces it if the keyboard moved
 * the cursor.
 *
 * @param {(text: string) => void} announce
 * @returns {(heatmap: Heatmap, cell: {row, col}|null, byKey: boolean, arrow?: string) => void}
 */
export function createReadout(announce) {
  return (heatmap, cell, byKey, arrow = " → ") => {
    if (!cell) return heatmap.showReadout(null);
    const { matrix } = heatmap;
    const at = cell.row * matrix.cols + cell.col;
    const value = matrix.masked?.[at] ? "masked" : formatNumber(matrix.numbers[at]);
    const text = `${matrix.rowName(cell.row)}${arrow}${matrix.colName(cell.col)}`;
    heatmap.showReadout(text, value);
    if (byKey) announce(`${text.replace("→", "to")}: ${value}`);
  };
}
