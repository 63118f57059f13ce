// Runs a sweep over sequence lengths and draws its cells as they arrive.

import { streamEvents } from "../api.js";
import { findById, h, setText } from "../dom.js";
import { buildChoice } from "../inputs/parameter_form.js";
import { createSaveMenu } from "../keep/save_menu.js";
import { createChart, drawSweep, fillSweepTable } from "./sweep_chart.js";
import { describeFastest, listCells } from "./sweep_table.js";

const LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];
const FIELDS = [
  ["heads", "Heads", 4, 1, 64],
  ["width", "Width", 64, 1, 512],
  ["repeats", "Repeats", 5, 1, 50],
];
const DEFAULT_VARIANTS = ["softmax", "linear", "efficient", "taylor"];

/**
 * Creates the panel.
 *
 * @param {HTMLElement} root
 * @param {Object} state of the page
 * @param {Object} callbacks
 * @param {(text: string) => void} callbacks.announce
 * @param {(body: Object) => void} callbacks.onRequest called with each request
 */
export function createSweepPanel(root, state, { announce, onRequest }) {
  const boxes = h("div", { class: "boxes", role: "group", "aria-label": "Variants to measure" });
  const longest = h(
    "select",
    { id: "sweep-longest" },
    ...LENGTHS.slice(3).map((n) => new Option(n.toLocaleString("en"), n, n === 2048, n === 2048)),
  );
  const mode = h(
    "select",
    { id: "sweep-mode" },
    new Option("a whole call", "whole", true, true),
    new Option("the next token", "decode"),
  );
  const inputs = FIELDS.map(([name, , value, min, max]) =>
    h("input", { id: `sweep-${name}`, type: "number", value, min, max, step: 1 }),
  );
  const fields = FIELDS.map(([name, label], i) => createField(`sweep-${name}`, label, inputs[i]));
  const button = h(
    "button",
    { type: "button", class: "primary", click: () => (running ? running.abort() : run()) },
    "Measure",
  );
  const progress = h("progress", { "aria-label": "Progress of the sweep", hidden: true });
  const status = h("p", { class: "hint", role: "status" });
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const chart = createChart();
  const table = h("table", { class: "numbers" });
  const details = h(
    "details",
    { hidden: true },
    h("summary", {}, "Times as a table"),
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of the times" },
      table,
    ),
  );
  chart.id = "chart";
  const saveMenu = createSaveMenu("the times", () => ({
    title: `Time per call by length, ${describeSizes(sweep)}`,
    table: listCells(sweep),
    svg: () => {
      const drawn = createChart();
      drawSweep(drawn, sweep);
      return drawn;
    },
  }));
  saveMenu.hidden = true;
  root.append(
    boxes,
    h(
      "div",
      { class: "row fields" },
      createField("sweep-mode", "Time", mode),
      createField("sweep-longest", "Up to", longest),
      ...fields,
      button,
    ),
    progress,
    status,
    error,
    h("figure", { class: "chart" }, chart, h("figcaption", {}, saveMenu)),
    details,
  );
  const selected = new Set(DEFAULT_VARIANTS);
  let running = null;
  let next = null; // settings of the sweep that waits for other requests
  let sweep = null;
  let knownNames = "";

  const draw = () => {
    if (!sweep) return;
    drawSweep(chart, sweep);
    fillSweepTable(table, sweep);
    for (const one of [details, saveMenu]) one.hidden = false;
  };
  new ResizeObserver(draw).observe(root);

  const run = async () => {
    const names = [...state.variants.keys()].filter((name) => selected.has(name));
    const body = {
      ...buildBody(names, Number(longest.value), inputs, state),
      ...(mode.value === "decode" && { mode: "decode" }),
    };
    onRequest(body);
    const labels = body.mode ? [] : names; // decoding may have two curves for a variant
    sweep = { cells: [], variants: labels, crossovers: [], lengths: body.lengths, body };
    const own = new AbortController();
    running = own;
    button.textContent = "Stop";
    progress.hidden = false;
    progress.removeAttribute("value");
    setText(error, null);
    draw();
    try {
      for await (const { event, data } of streamEvents("/v1/sweep", body, own.signal))
        handleEvent(event, data);
    } catch (problem) {
      if (running !== own) return; // the next one shows its own
      if (problem.name === "AbortError") status.textContent = "Stopped.";
      else setText(error, problem.detail ?? problem.message);
    } finally {
      if (running === own) {
        running = null;
        button.textContent = "Measure";
        progress.hidden = true;
      }
    }
  };
  const handleEvent = (event, data) => {
    if (event === "progress") {
      progress.max = data.total;
      progress.value = data.done;
      status.textContent = `${data.done} of ${data.total}: ${data.variant} at ${data.length.toLocaleString("en")}`;
    } else if (event === "cell") {
      sweep.cells.push(data);
      if (data.way) sweep.variants[data.index] = `${data.variant}, ${data.way}`;
    } else if (event === "done") {
      sweep.crossovers = data.crossovers;
      status.textContent = `${sweep.cells.length} measurements. ${describeFastest(sweep)}`;
      announce("The sweep is complete");
    } else if (event === "problem" || event === "error") {
      setText(error, data.detail ?? "The sweep failed.");
    }
    draw();
  };

  return {
    /**
     * Starts a sweep; null ends one.
     *
     * @param {Object|null} settings variants: their names; and values of controls, by name: longest,
     *   mode, heads, width, repeats
     * @param {Promise|null} quiet settled when no other request can change the times
     */
    measure: async (settings, quiet) => {
      running?.abort();
      next = settings;
      if (!settings) return;
      const { variants, ...values } = settings;
      selected.clear();
      for (const name of variants) selected.add(name);
      for (const box of boxes.querySelectorAll("input")) box.checked = selected.has(box.name);
      for (const [name, value] of Object.entries(values)) findById(`sweep-${name}`).value = value;
      await quiet;
      if (next === settings) run();
    },
    update: () => {
      const names = [...state.variants.values()]
        .filter(({ inputs: variantInputs }) => "value" in variantInputs)
        .map(({ variant }) => variant);
      if (knownNames === names.join()) return;
      knownNames = names.join();
      boxes.replaceChildren(...names.map((name) => createCheckbox(name, selected)));
      status.textContent = "Requests of other clients run in between and can change the times.";
    },
  };
}

function buildBody(names, longest, inputs, state) {
  const sizes = Object.fromEntries(FIELDS.map(([name], i) => [name, Number(inputs[i].value)]));
  const variants = names.map((name) => buildChoice(state.variants.get(name), state.parameters));
  return { variants, lengths: LENGTHS.filter((length) => length <= longest), ...sizes };
}

const describeSizes = ({ body: { heads, width } }) =>
  `${heads} ${heads === 1 ? "head" : "heads"} of width ${width}`;

function createField(id, label, input) {
  return h("div", { class: "field" }, h("label", { for: id }, label), input);
}

function createCheckbox(name, selected) {
  const id = `sweep-with-${name}`;
  const input = h("input", {
    type: "checkbox",
    id,
    name,
    change: () => (input.checked ? selected.add(name) : selected.delete(name)),
  });
  input.checked = selected.has(name);
  return h("div", { class: "check" }, input, h("label", { for: id }, name));
}
