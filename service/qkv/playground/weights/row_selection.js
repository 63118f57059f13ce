// Which row the panel shows: the one that is held, or pointed at, or was last.

import { debounce } from "../dom.js";
import { axisNames } from "./heatmap_data.js";
import { createRowPanel } from "./row_panel.js";
import { binOfPosition, createRowReader, firstOfBin } from "./weights_request.js";

/**
 * Keeps the panel at its row.
 *
 * @param {HTMLElement} root of the panel
 * @param {Object} state of the page: its head, its labels, and the row that is held or null
 * @param {Object} callbacks
 * @param {(bin: number|null) => void} callbacks.onMark told which row of the map is held
 * @param {(call: Object) => void} callbacks.onCall told of every call
 * @param {(error: Error) => void} callbacks.onError
 * @param {(text: string) => void} callbacks.announce
 */
export function createRowSelection(root, state, callbacks) {
  const showRow = createRowPanel(root, (row) => select(row));
  let view = null;
  let readRow = null; // gets rows of the view
  let lastRow = 0;
  let pending = null; // the row that is on its way

  const draw = async (wantedRow = state.selectedRow ?? lastRow) => {
    const { request, weights } = view;
    const row = Math.min(wantedRow, request.rows - 1); // it may be one of a longer view before
    const { head } = state;
    const { selectedRow } = state;
    callbacks.onMark(
      selectedRow === null ? null : binOfPosition(selectedRow, weights.rows, request.rows),
    );
    if (pending?.row === row && pending.head === head) return;
    pending?.controller.abort();
    const current = { row, head, controller: new AbortController() };
    pending = current;
    try {
      const rowWeights = await readRow(head, row, current.controller.signal, callbacks.onCall);
      if (pending !== current) return;
      lastRow = row;
      showWeights(rowWeights, row, head);
    } catch (error) {
      if (error.name !== "AbortError") callbacks.onError(error);
    } finally {
      if (pending === current) pending = null;
    }
  };
  const showWeights = (weights, row, head) => {
    const { request, stats, kind } = view;
    const names = axisNames(view, state.labels);
    const at = head * request.rows + row;
    showRow({
      row,
      rows: request.rows,
      isSelected: state.selectedRow !== null,
      weights,
      rowName: names.row.fullName,
      colName: names.col.fullName,
      entropy: stats.entropy?.[at],
      effectiveKeys: stats.effective_keys?.[at],
      isSigned: kind === "signed",
    });
  };
  const select = (row) => {
    state.selectedRow = row;
    draw();
    if (row === null) return;
    callbacks.announce(`Holding ${axisNames(view, state.labels).row.fullName(row)}`);
  };
  const drawDebounced = debounce(draw, 80);
  const firstRow = (bin) => firstOfBin(bin, view.weights.rows, view.request.rows);

  return {
    /** Draws the row of a view that has weights. */
    draw: (newView) => {
      if (newView !== view) {
        pending?.controller.abort();
        [view, readRow, pending] = [newView, createRowReader(newView), null];
      }
      draw();
    },
    /** A row of the map is to be held, or none. */
    select: (bin) => select(bin === null ? null : firstRow(bin)),
    /** A row of the map is pointed at. */
    point: (bin) => {
      if (state.selectedRow !== null) return;
      (view.request.bins === null ? draw : drawDebounced)(firstRow(bin));
    },
  };
}
