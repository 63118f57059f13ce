// Which row the panel shows: the one that is held, or pointed at, or was last.

import { soon } from "./dom.js";
import { rowPanel } from "./row.js";
import { namesOf } from "./shown.js";
import { binOf, firstOf, rowsOf } from "./view.js";

/**
 * Keeps the panel at its row.
 *
 * @param {HTMLElement} root of the panel
 * @param {Object} state of the page: its head, its labels, and the row that is held or null
 * @param {Object} to
 * @param {(bin: number|null) => void} to.marked told which row of the map is held
 * @param {(call: Object) => void} to.ran told of every call
 * @param {(error: Error) => void} to.failed
 * @param {(text: string) => void} to.speak
 */
export function rowKept(root, state, to) {
  const fill = rowPanel(root, (row) => hold(row));
  let view = null;
  let read = null; // gets rows of the view
  let last = 0;
  let reading = null; // the row that is on its way

  const draw = async (wanted = state.held ?? last) => {
    const { ask, weights } = view;
    const row = Math.min(wanted, ask.rows - 1); // it may be one of a longer view before
    const { head } = state;
    to.marked(state.held === null ? null : binOf(state.held, weights.rows, ask.rows));
    if (reading?.row === row && reading.head === head) return;
    reading?.controller.abort();
    const own = { row, head, controller: new AbortController() };
    reading = own;
    try {
      const numbers = await read(head, row, own.controller.signal, to.ran);
      if (reading !== own) return;
      last = row;
      show(numbers, row, head);
    } catch (error) {
      if (error.name !== "AbortError") to.failed(error);
    } finally {
      if (reading === own) reading = null;
    }
  };
  const show = (weights, row, head) => {
    const { ask, stats, kind } = view;
    const names = namesOf(view, state.labels);
    const at = head * ask.rows + row;
    fill({
      row,
      rows: ask.rows,
      isHeld: state.held !== null,
      weights,
      rowName: names.row.full,
      colName: names.col.full,
      entropy: stats.entropy?.[at],
      effective: stats.effective_keys?.[at],
      isSigned: kind === "signed",
    });
  };
  const hold = (row) => {
    state.held = row;
    draw();
    if (row !== null) to.speak(`Holding ${namesOf(view, state.labels).row.full(row)}`);
  };
  const drawSoon = soon(draw, 80);
  const first = (bin) => firstOf(bin, view.weights.rows, view.ask.rows);

  return {
    /** Draws the row of a view that has weights. */
    draw: (given) => {
      if (given !== view) {
        reading?.controller.abort();
        [view, read, reading] = [given, rowsOf(given), null];
      }
      draw();
    },
    /** A row of the map is to be held, or none. */
    hold: (bin) => hold(bin === null ? null : first(bin)),
    /** A row of the map is pointed at. */
    point: (bin) => {
      if (state.held === null) (view.ask.bins === null ? draw : drawSoon)(first(bin));
    },
  };
}
