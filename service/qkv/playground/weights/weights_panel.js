// Draws the weights of a run: heat map, heads, selected row and table; and the output below them.

import { findById } from "../dom.js";
import { showProblem } from "../error_messages.js";
import { createHeadGrid } from "./head_grid.js";
import { Heatmap } from "./heatmap.js";
import { outputMatrix, weightsMatrix } from "./heatmap_data.js";
import { createReadout } from "./heatmap_readout.js";
import { createRowSelection } from "./row_selection.js";
import { showWeightsTable } from "./weights_table.js";

/**
 * Creates the panel.
 *
 * @param {Object} state of the page
 * @param {Object} callbacks
 * @param {(head: number) => void} callbacks.onHead called with the head that the user selects
 * @param {(row: number) => void} callbacks.onRow called with the row that is shown
 * @param {() => void} callbacks.onChange called when the pinned row or the shades changed
 * @param {(call: Object) => void} callbacks.onCall called for each request
 * @param {(text: string) => void} callbacks.announce
 */
export function createWeightsPanel(state, { onHead, onRow, onChange, onCall, announce }) {
  const showReadout = createReadout(announce);
  const showHeads = createHeadGrid(findById("heads"), onHead);
  const rowSelection = createRowSelection(findById("row"), state, {
    onMark: (bin) => map.markRow(bin),
    onShow: onRow,
    onSelect: onChange,
    onCall,
    onError: showProblem,
    announce,
  });
  const map = new Heatmap(findById("map"), {
    name: "the weights",
    onPoint: (cell, byKey) => {
      showReadout(map, cell, byKey);
      if (cell) rowSelection.point(cell.row);
    },
    effect: "pin its row",
    onSelect: (bin) => rowSelection.select(bin),
    onRoot: (usesRoot) => {
      state.usesRoot = usesRoot;
      onChange();
    },
  });
  const output = new Heatmap(findById("output"), {
    name: "the output",
    maxHeight: 320,
    onPoint: (cell, byKey) => showReadout(output, cell, byKey, " "),
  });
  return {
    /** Redraws with the colours of the theme. */
    repaint: (view) => {
      for (const one of [map, output]) one.repaint();
      if (view?.weights) showHeads(view.weights, state.head);
    },
    showReadout,
    selectRow: rowSelection.select,
    /** Empties the table, whose numbers must not get the labels of the next run. */
    clear: () => showWeightsTable(null),
    draw: (view) => {
      findById("weights").classList.toggle("without", !view.weights);
      if (view.weights) {
        const matrix = weightsMatrix(view, state.head, state.labels);
        map.setRoot(state.usesRoot);
        map.show(matrix);
        showHeads(view.weights, state.head);
        showWeightsTable(matrix);
        rowSelection.draw(view);
      }
      output.show(outputMatrix(view, state.head, state.labels));
    },
  };
}
