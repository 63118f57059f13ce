// Chooses the row of the row panel: the pinned row, the row at the cursor, or the last one.

import { debounce } from "../dom.js";
import { axisNames, describeHead, describeRun } from "./heatmap_data.js";
import { createRowPanel } from "./row_panel.js";
import { binOfPosition, createRowReader, firstOfBin } from "./weights_request.js";

/**
 * Creates the row panel and updates it.
 *
 * @param {HTMLElement} root of the panel
 * @param {Object} state of the page: its head, its labels, and the pinned row or null
 * @param {Object} callbacks
 * @param {(bin: number|null) => void} callbacks.onMark called with the pinned row of the map
 * @param {(row: number) => void} callbacks.onShow called with the row that is shown
 * @param {() => void} callbacks.onSelect called when the user pinned or unpinned a row
 * @param {(call: Object) => void} callbacks.onCall called for each request
 * @param {(error: Error) => void} callbacks.onError
 * @param {(text: string) => void} callbacks.announce
 */
export function createRowSelection(root, state, callbacks) {
  const showRow = createRowPanel(root, (row) => select(row));
  let view = null;
  let readRow = null; // reads rows of the view
  let lastRow = 0;
  let pending = null; // the row that is being fetched

  const draw = async (wantedRow = state.selectedRow ?? lastRow) => {
    const { request, weights } = view;
    const row = Math.min(wantedRow, request.rows - 1); // the view before may have had more rows
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
      callbacks.onShow(row);
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
    const run = `${describeRun(request)}${describeHead(head, view.weights)}`;
    showRow({
      row,
      title: `Weights of ${run}, ${names.row.fullName(row)}`,
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
    callbacks.onSelect();
    draw();
    if (row === null) return;
    callbacks.announce(`Pinned: ${axisNames(view, state.labels).row.fullName(row)}`);
  };
  const drawDebounced = debounce(draw, 80);
  const firstRow = (bin) => firstOfBin(bin, view.weights.rows, view.request.rows);

  return {
    /** Draws a row of a view with weights. */
    draw: (newView) => {
      if (newView !== view) {
        pending?.controller.abort();
        [view, readRow, pending] = [newView, createRowReader(newView), null];
      }
      draw();
    },
    /** Pins a row of the map; null unpins. */
    select: (bin) => select(bin === null ? null : firstRow(bin)),
    /** Shows the row at the cursor, unless a row is pinned. */
    point: (bin) => {
      if (state.selectedRow !== null) return;
      (view.request.bins === null ? draw : drawDebounced)(firstRow(bin));
    },
  };
}
