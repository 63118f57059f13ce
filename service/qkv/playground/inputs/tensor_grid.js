// The numbers of a small tensor as a grid in which the user changes them.

import { countElements, fromNumbers, toNumbers } from "../data/dtypes.js";
import { parseCell } from "../data/tables.js";
import { h, setText } from "../dom.js";

const MAX_CELLS = 128;
const MAX_COLUMNS = 16;
const DIGITS = { float64: 17, float32: 7, float16: 4, bfloat16: 3 }; // that a cell shows
const STEPS = { ArrowUp: -1, ArrowDown: 1, Enter: 1 }; // rows

/** True if a tensor is small enough for a grid. */
export function isEditable({ shape }) {
  const count = countElements(shape);
  return shape.length > 0 && count > 0 && count <= MAX_CELLS && shape.at(-1) <= MAX_COLUMNS;
}

/**
 * Creates the grid: a line for each index before the last axis.
 *
 * @param {Object} entry of the list of tensors; changed in place
 * @param {{labels: string[], openGrids: Set<string>, onEdit: () => void}} list
 * @returns {{button: HTMLElement, grid: HTMLElement}} `button` shows and hides the grid
 */
export function createGrid(entry, { labels, openGrids, onEdit }) {
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const area = h("div", { class: "scroll" });
  const grid = h("div", { class: "cells" }, area, error);
  const edit = (at, value) => {
    try {
      Object.assign(entry, editTensor(entry, at, value));
      setText(error, null);
      onEdit();
      return true;
    } catch (problem) {
      setText(error, problem.message);
      return false;
    }
  };
  const button = h("button", {
    type: "button",
    class: "quiet",
    click: () => {
      openGrids[grid.hidden ? "add" : "delete"](entry.name);
      show();
    },
  });
  const show = () => {
    const isOpen = openGrids.has(entry.name);
    grid.hidden = !isOpen;
    button.textContent = isOpen ? "Done" : "Edit";
    button.setAttribute("aria-label", `${isOpen ? "Done editing" : "Edit"} ${entry.name}`);
    button.setAttribute("aria-expanded", String(isOpen));
    if (isOpen && !area.childElementCount) area.append(createTable(entry, labels, edit));
  };
  show();
  return { button, grid };
}

/** Returns the fields of an entry with another number: the tensor is the user's then. */
function editTensor({ name, tensor }, at, value) {
  const { shape, dtype, literal } = tensor;
  const numbers = toNumbers(tensor);
  const number = typeof value === "boolean" ? Number(value) : readNumber(value, name);
  numbers[at] = number;
  const edited = { ...fromNumbers(numbers, shape, dtype), ...(literal ? { literal } : {}) };
  return { tensor: edited, isUploaded: true, isRandom: false, file: undefined };
}

function readNumber(text, name) {
  const number = parseCell(text.trim().replace(",", "."));
  if (number !== null) return Number(number);
  throw new Error(`A number of ${name} is invalid: got “${text.slice(0, 40)}”, expected a number.`);
}

function createTable({ name, tensor }, labels, edit) {
  const { shape } = tensor;
  const cols = shape.at(-1);
  const numbers = toNumbers(tensor);
  const rows = numbers.length / cols;
  const rowNames = Array.from({ length: rows }, (_, row) =>
    labels.length === rows ? labels[row] : indexOf(row, shape.slice(0, -1)),
  );
  const heading = (text, scope) => h("th", { scope }, text);
  const lines = rowNames.map((rowName, row) => {
    const cells = Array.from({ length: cols }, (_, col) => {
      const label = `${name}, ${rowName}, ${col}`;
      return h(
        "td",
        {},
        createCell(label, numbers[row * cols + col], tensor, row * cols + col, edit),
      );
    });
    return h("tr", {}, heading(rowName, "row"), ...cells);
  });
  const columns = Array.from({ length: cols }, (_, col) => heading(String(col), "col"));
  const table = h(
    "table",
    { keydown: moveFocus },
    h("caption", { class: "unseen" }, `Numbers of ${name}`),
    h("thead", {}, h("tr", {}, h("td", {}), ...columns)),
    h("tbody", {}, ...lines),
  );
  return table;
}

function createCell(label, number, { dtype }, at, edit) {
  const input = h("input", { "aria-label": label, autocomplete: "off" });
  if (dtype === "bool") {
    input.type = "checkbox";
    input.checked = number === 1;
    input.addEventListener("change", () => edit(at, input.checked));
    return input;
  }
  input.inputMode = "decimal";
  input.value = formatCell(number, dtype);
  input.addEventListener("change", () => {
    input.toggleAttribute("aria-invalid", !edit(at, input.value));
  });
  input.addEventListener("focus", () => input.select());
  return input;
}

/** Formats a number so that its text has no digits that its dtype does not hold. */
const formatCell = (number, dtype) =>
  Number.isFinite(number)
    ? String(dtype in DIGITS ? Number(number.toPrecision(DIGITS[dtype])) : number)
    : String(number).replace("Infinity", "inf").replace("NaN", "nan");

/** Moves the focus to the cell above or below; Enter too, instead of sending the form. */
function moveFocus(event) {
  const step = STEPS[event.key];
  if (!step) return;
  event.preventDefault();
  const cell = event.target.closest("td");
  const row = cell.parentElement.parentElement.rows[cell.parentElement.sectionRowIndex + step];
  row?.cells[cell.cellIndex].firstElementChild.focus();
}

/** Returns the indices of a line: 2, or 0, 2 of several axes. */
function indexOf(row, shape) {
  let rest = row;
  const indices = shape.toReversed().map((size) => {
    const index = rest % size;
    rest = Math.floor(rest / size);
    return index;
  });
  return indices.toReversed().join(", ");
}
