// Compares variants with a baseline: differences of outputs and weights, and cost.

import { post } from "../api.js";
import { AUTO_RUN_BYTES, layerBytes } from "../data/request_body.js";
import { h, setText } from "../dom.js";
import { buildChoice } from "../inputs/parameter_form.js";
import { encodeInputs, inputsFor } from "../inputs/request_inputs.js";
import { createSaveMenu } from "../keep/save_menu.js";
import { comparableVariants, runnableVariants } from "../weights/weights_request.js";
import { createMetricsTable, listMetrics } from "./metrics_table.js";

const AUTO_RUN_SCORES = 65536; // larger comparisons wait for the button
const DEFAULT_ROWS = 1024; // the service samples this many rows by default

/**
 * Creates the panel.
 *
 * @param {HTMLElement} root
 * @param {Object} state of the page
 * @param {Object} callbacks
 * @param {(body: Object) => void} callbacks.onRequest called with each request
 * @param {() => void} callbacks.onChoose called when the user chose other variants or columns
 */
export function createComparePanel(root, state, { onRequest, onChoose }) {
  const anchor = h("select", {
    id: "anchor",
    change: () => {
      state.baseline = anchor.value;
      updateChoices();
      onChoose();
    },
  });
  const boxes = h("div", { class: "boxes", role: "group", "aria-label": "Variants to compare" });
  const allRowsInput = h("input", { type: "checkbox", id: "compare-all-rows" });
  const allRows = h(
    "div",
    { class: "check", hidden: true },
    allRowsInput,
    h("label", { for: "compare-all-rows" }, "All rows"),
  );
  const button = h("button", { type: "button", click: () => run() }, "Compare");
  const status = h("p", { class: "hint", role: "status" });
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const notes = h("ul", { class: "notes" });
  const area = h("div", {
    class: "scroll",
    tabindex: "0",
    role: "region",
    "aria-label": "Comparison",
  });
  const columnsButton = h("button", {
    type: "button",
    click: () => {
      state.showsAllMetrics = !state.showsAllMetrics;
      draw();
      onChoose();
    },
  });
  const saveMenu = createSaveMenu("the metrics", () => ({
    title: `Variants compared with ${shown.anchor.variant}`,
    table: listMetrics(shown, true),
    shownTable: listMetrics(shown, state.showsAllMetrics),
  }));
  const below = h("div", { class: "row", hidden: true }, columnsButton, saveMenu);
  root.append(
    h("h3", {}, "Metrics"),
    h(
      "div",
      { class: "row" },
      h("div", { class: "field inline" }, h("label", { for: "anchor" }, "Baseline"), anchor),
      boxes,
      allRows,
      button,
    ),
    status,
    error,
    area,
    below,
    notes,
  );
  let running = null;
  let shown = null; // the last response

  const draw = () => {
    below.hidden = !shown;
    columnsButton.textContent = state.showsAllMetrics ? "Fewer columns" : "All columns";
    area.replaceChildren(shown ? createMetricsTable(shown, state.showsAllMetrics) : "");
    notes.replaceChildren(...(shown?.notes ?? []).map((note) => h("li", {}, note)));
  };

  const updateChoices = () => {
    const names = runnableVariants(state).map(({ variant }) => variant);
    const selected = names.includes(state.baseline)
      ? state.baseline
      : names.includes("softmax")
        ? "softmax"
        : names[0];
    anchor.replaceChildren(
      ...names.map((name) => new Option(name, name, false, name === selected)),
    );
    const others = selected
      ? comparableVariants(state, state.variants.get(selected)).map(({ variant }) => variant)
      : [];
    boxes.replaceChildren(
      ...others.map((name) =>
        createCheckbox(name, !state.excluded.includes(name), (isIncluded) => {
          const others = state.excluded.filter((one) => one !== name);
          state.excluded = isIncluded ? others : [...others, name];
          onChoose();
        }),
      ),
    );
    root.hidden = names.length < 2;
    button.disabled = !others.length;
    return others.length > 0;
  };
  const run = async () => {
    running?.abort();
    running = new AbortController();
    const { signal } = running;
    const anchorVariant = state.variants.get(anchor.value);
    const comparable = comparableVariants(state, anchorVariant);
    const chosen = comparable.filter(({ variant }) => !state.excluded.includes(variant));
    const allVariants = [anchorVariant, ...chosen];
    const inputs = Object.assign(
      {},
      ...allVariants.map((variant) => inputsFor(state.tensors, variant, state.layer)),
    );
    const body = {
      inputs: encodeInputs(inputs, inputs.x && state.layer),
      anchor: buildChoice(anchorVariant, state.parameters),
      variants: chosen.map((variant) => buildChoice(variant, state.parameters)),
    };
    if (state.dtype) body.dtype = state.dtype;
    if (allRowsInput.checked && !allRows.hidden) body.rows = null;
    if (state.layer && inputs.x) body.layer = state.layer;
    onRequest(body);
    status.textContent = "Comparing…";
    try {
      const { result } = await post("/v1/compare", body, signal);
      if (signal.aborted) return;
      setText(error, null);
      shown = result;
      draw();
      status.textContent =
        "Each variant uses the parameters above that it has. The error of the baseline is its distance from float64. " +
        "Of two numbers, the first is the mean over rows, the second the worst row.";
    } catch (problem) {
      if (problem.name === "AbortError") return;
      setText(error, problem.detail ?? problem.message);
      status.textContent = "";
    }
  };

  return {
    update: (request) => {
      running?.abort();
      const canCompare = updateChoices();
      // the service compares all of so few rows anyway
      allRows.hidden = !canCompare || request.rows <= DEFAULT_ROWS;
      const isLarge = layerBytes(state.layer) > AUTO_RUN_BYTES;
      if (canCompare && !isLarge && request.rows * request.cols <= AUTO_RUN_SCORES) return run();
      setText(error, null);
      shown = null;
      draw();
      status.textContent = canCompare
        ? isLarge
          ? "Comparing sends the layer again. Press Compare to start."
          : `Comparing ${request.rows} × ${request.cols} weights takes a moment. Press Compare to start.`
        : `No other variant accepts the same inputs as ${anchor.value}.`;
    },
  };
}

function createCheckbox(name, isChecked, onChange) {
  const input = h("input", {
    type: "checkbox",
    id: `compare-${name}`,
    change: () => onChange(input.checked),
  });
  input.checked = isChecked;
  return h("div", { class: "check" }, input, h("label", { for: `compare-${name}` }, name));
}
