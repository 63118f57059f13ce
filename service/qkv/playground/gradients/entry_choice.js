// Chooses an entry of the output: in a map of the output, or by two fields.

import { formatNumber, h } from "../dom.js";
import { Heatmap } from "../weights/heatmap.js";
import { outputMatrix } from "../weights/heatmap_data.js";
import { createReadout } from "../weights/heatmap_readout.js";

/**
 * Creates the map and the fields.
 *
 * @param {HTMLElement} root
 * @param {(entry: {row: number, col: number}) => void} onChoose
 * @param {(text: string) => void} announce called if the keyboard moved the cursor, and for each choice
 * @returns {{show: (view, state, place) => void, repaint: () => void}} `place`: from `locateEntry`
 */
export function createEntryChoice(root, onChoose, announce) {
  const choose = (entry) => {
    onChoose(entry);
    announce(`Chosen: ${chosen.textContent}`);
  };
  const [row, col] = ["row", "channel"].map((name) =>
    h("input", {
      id: `entry-${name}`,
      type: "number",
      min: 0,
      step: 1,
      change: () => choose({ row: readNumber(row), col: readNumber(col) }),
    }),
  );
  const chosen = h("p", { class: "chosen" });
  const figure = h("figure", { class: "map", "aria-label": "Entry of the output" });
  const map = new Heatmap(figure, {
    name: "the output",
    maxHeight: 240,
    isSmall: true,
    effect: "choose it",
    onPoint: (cell, byKey) => showReadout(map, cell, byKey, ", "),
    onSelect: (_, cell) => cell && choose(cell),
  });
  const showReadout = createReadout(announce);
  const fields = h("div", { class: "row" }, createField("Row", row), createField("Channel", col));
  const title = h("h3", {}, "Entry of the output");
  const beside = h("div", { class: "beside" }, title, chosen, fields, map.readout);
  root.append(h("div", { class: "gradient-entry" }, figure, beside));

  const show = (view, { head, labels }, place) => {
    const matrix = outputMatrix(view, head, labels);
    const label = `Output: ${matrix.rows} rows by ${matrix.cols} channels.`;
    map.show({ ...matrix, label, chosen: place });
    const value = matrix.numbers[place.row * matrix.cols + place.col];
    const name = `${matrix.rowName(place.row)}, ${matrix.colName(place.col)}`;
    chosen.replaceChildren(`${name}: `, h("strong", {}, formatNumber(value)));
    setField(row, place.row, matrix.rows);
    setField(col, place.col, matrix.cols);
  };
  return { show, repaint: () => map.repaint() };
}

const readNumber = ({ value, max }) =>
  Math.min(Math.max(Math.round(Number(value)) || 0, 0), Number(max));

function setField(input, value, count) {
  input.max = count - 1;
  input.value = value;
}

const createField = (name, input) =>
  h("div", { class: "field inline" }, h("label", { for: input.id }, name), input);
