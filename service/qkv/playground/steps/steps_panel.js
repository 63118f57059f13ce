// Follows one row through all steps of a run, from the inputs to the output.

import { findById, h, setText } from "../dom.js";
import { toSentence } from "../error_messages.js";
import { axisNames } from "../weights/heatmap_data.js";
import { showFormula } from "./formula.js";
import { createStepFigure } from "./step_figure.js";
import { findMasked } from "./step_mask.js";
import { fetchSteps, listSteps, reasonWithoutSteps } from "./steps_request.js";

/**
 * Creates the panel.
 *
 * @param {Object} state of the page
 * @param {Object} layout from `createPageLayout`
 * @param {Object} callbacks
 * @param {(row: number) => void} callbacks.onRow called with the row that the user chose
 * @param {(call: Object) => void} callbacks.onCall called for each request
 */
export function createStepsPanel(state, layout, { onRow, onCall }) {
  const section = findById("steps");
  const about = h("p", { class: "hint", role: "status" });
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const rowInput = h("input", {
    id: "followed-row",
    type: "number",
    min: 0,
    step: 1,
    change: () => rowInput.value !== "" && onRow(clamp(rowInput)),
  });
  const rowLabel = h("label", { for: "followed-row" }, "Followed row");
  const rowName = h("strong", {});
  const field = h("div", { class: "field inline" }, rowLabel, rowInput, rowName);
  const formula = h("p", { class: "formula" });
  const list = h("ol", { class: "step-list" });
  const body = h("div", { hidden: true }, h("div", { class: "steps-bar" }, field, formula), list);
  section.querySelector("div").append(about, error, body);

  let view = null;
  let row = 0;
  let shown = null; // {view, steps, figures}
  let running = null;
  let frame = 0; // the next frame, if it draws another row
  let marks = []; // functions that mark the symbol of a step in a formula

  const point = (name) => {
    for (const mark of marks) mark(name);
    for (const item of list.children) item.classList.toggle("lit", item.dataset.step === name);
  };
  const choose = (name) => {
    layout.open("steps");
    const item = list.querySelector(`[data-step="${name}"]`);
    if (!item) return section.scrollIntoView(); // its steps are on their way
    item.querySelector("[tabindex]").focus({ preventScroll: true });
    item.scrollIntoView({ block: "center" });
  };
  const showFormulas = () => {
    const { variant } = view.request;
    const steps = reasonWithoutSteps(view) ? [] : listSteps(view);
    const callbacks = { onPoint: point, onChoose: choose };
    marks = [findById("formula"), formula].map((root) =>
      showFormula(root, variant.formula, steps, callbacks),
    );
  };
  const drawRow = () => {
    if (!shown?.figures || shown.view !== view) return;
    const names = axisNames(view, state.labels);
    const heads = view.weights.shape.length > 3 ? view.weights.shape.at(-3) : 1;
    const item = Math.floor(state.head / heads);
    const place = { item, head: state.head % heads, heads, row };
    const naming = {
      key: state.labels.join("\n"),
      row: names.row.fullName,
      axis: (letter, at) => nameOf(letter, at, names),
    };
    rowInput.max = view.request.rows - 1;
    if (document.activeElement !== rowInput) rowInput.value = row;
    rowName.textContent = names.row.fullName(row);
    const isMasked = findMasked(shown.steps, place);
    shown.figures.forEach((figure, i) => figure.draw(place, naming, isMasked(shown.steps[i])));
  };
  const load = () => {
    if (!view) return;
    const reason = reasonWithoutSteps(view);
    body.hidden = reason !== null;
    setText(about, reason);
    setText(error, null);
    if (reason) return;
    if (shown?.view === view) drawRow();
    else run();
  };
  const run = async () => {
    running?.abort();
    running = new AbortController();
    const { signal } = running;
    const current = { view };
    shown = current;
    section.setAttribute("aria-busy", "true");
    try {
      const { steps, timing, elapsedMs } = await fetchSteps(view, signal);
      onCall({ variant: view.request.variant.variant, what: "steps", timing, elapsedMs });
      const callbacks = { onPoint: point, onRow };
      current.steps = steps;
      current.figures = steps.map((step, i) => createStepFigure(step, i + 1, callbacks));
      list.replaceChildren(...current.figures.map(({ element }) => element));
      drawRow();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      setText(error, toSentence(problem.detail ?? problem.message));
    } finally {
      if (running?.signal === signal) section.removeAttribute("aria-busy");
    }
  };
  const loadIfOpen = () => layout.whenOpen("steps", load);
  const drawFrame = () => {
    frame = 0;
    loadIfOpen();
  };

  return {
    /** Shows the formula and the steps of a view; requests them while the section is open. */
    show: (newView) => {
      view = newView;
      section.hidden = !view.weights;
      if (!view.weights) return;
      showFormulas();
      loadIfOpen();
    },
    /** Stops what is running: the next view has other numbers. */
    clear: () => {
      running?.abort();
      view = null;
    },
    /** Follows another row. */
    follow: (newRow) => {
      row = newRow;
      if (!frame) frame = requestAnimationFrame(drawFrame); // the pointer may cross many rows
    },
  };
}

const clamp = ({ value, max }) =>
  Math.min(Math.max(Math.round(Number(value)) || 0, 0), Number(max));

/** Names a position on an axis: a query, a key, or the index on another one. */
function nameOf(letter, at, names) {
  if (letter === "S") return names.col.fullName(at);
  return letter === "L" || letter === "B" ? names.row.fullName(at) : String(at);
}
