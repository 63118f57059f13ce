// Shows the gradients of one entry of the output, and checks them by finite differences.

import { findById, formatNumber, h, setText } from "../dom.js";
import { toSentence } from "../error_messages.js";
import { axisNames, describeHead, describeRun } from "../weights/heatmap_data.js";
import { createEntryChoice } from "./entry_choice.js";
import { fetchDifferences } from "./finite_differences.js";
import { createGradientMaps, entryName } from "./gradient_maps.js";
import { locateEntry } from "./gradient_tensors.js";
import { createGradientTable } from "./gradient_table.js";
import {
  buildGradientsRequest,
  fetchGradients,
  reasonWithoutDifferences,
  reasonWithoutGradients,
} from "./gradients_request.js";

/**
 * Creates the panel.
 *
 * @param {Object} state of the page; `entry` is the chosen entry of the output
 * @param {Object} callbacks
 * @param {() => void} callbacks.onChange called when the user chose another entry
 * @param {(call: Object) => void} callbacks.onCall called for each request
 * @param {(request: {path, body}) => void} callbacks.onRequest called with each request of gradients
 * @param {(text: string) => void} callbacks.announce
 */
export function createGradientsPanel(state, { onChange, onCall, onRequest, announce }) {
  const section = findById("gradients");
  const about = h("p", { class: "hint", role: "status" });
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const body = h("div", { hidden: true });
  section.querySelector("div").append(about, error, body);
  const choose = (entry) => {
    state.entry = entry;
    onChange();
    load();
  };
  const choice = createEntryChoice(body, choose, announce);
  const maps = createGradientMaps(body, announce);
  const showTable = createGradientTable(body);
  let view = null;
  let shown = null; // {view, at, tensors}
  let running = null;

  const showTensors = (place, tensors) => {
    const named = tensors.map((tensor) => nameTensor(view, state, place, tensor));
    maps.show(named);
    showTable(named);
    return named;
  };
  const load = () => {
    if (!view) return;
    const reason = reasonWithoutGradients(view);
    body.hidden = reason !== null;
    if (reason) return setText(about, reason);
    const place = locateEntry(view, state.head, state.entry);
    choice.show(view, state, place);
    if (shown?.view !== view || shown.at !== place.at) run(place);
    else showTensors(place, shown.tensors); // the labels may be others
  };
  const run = async (place) => {
    running?.abort();
    running = new AbortController();
    const { signal } = running;
    const current = { view, at: place.at, tensors: [] };
    shown = current;
    section.setAttribute("aria-busy", "true");
    try {
      await fetchTensors(place, current, signal);
      setText(error, null);
      about.hidden = false;
      about.replaceChildren(...describeCheck(view, showTensors(place, current.tensors)));
    } catch (problem) {
      if (problem.name === "AbortError") return;
      setText(error, toSentence(problem.detail ?? problem.message));
    } finally {
      if (running?.signal === signal) section.removeAttribute("aria-busy");
    }
  };
  const fetchTensors = async (place, current, signal) => {
    const tell = (what, { timing, elapsedMs }) =>
      onCall({ variant: view.request.variant.variant, what, timing, elapsedMs });
    const request = buildGradientsRequest(view, place);
    onRequest(request);
    const result = await fetchGradients(view, place, request, signal);
    tell("gradients", result);
    current.tensors = result.tensors;
    showTensors(place, current.tensors);
    if (reasonWithoutDifferences(view)) return;
    for (const tensor of current.tensors) {
      const checked = await fetchDifferences(view, place, tensor, signal);
      tell(`finite differences of ${tensor.name}`, checked);
      tensor.quotients = checked.quotients;
    }
  };

  return {
    /** Takes the view whose gradients are loaded next. */
    show: (newView) => (view = newView),
    /** Draws the gradients of the view, and requests them if they are not there yet. */
    load,
    /** Stops what is running: the next view has other numbers. */
    clear: () => {
      running?.abort();
      view = null;
    },
    repaint: () => [choice, maps].forEach((one) => one.repaint()),
  };
}

/** Adds the names of rows and columns, and the title of saved figures. */
function nameTensor(view, { head, labels }, place, tensor) {
  const names = axisNames(view, labels);
  const axis = tensor.letters.at(-2) === "S" ? names.col : names.row;
  const isItem = tensor.letters.at(-2) === "B";
  const title = `for row ${place.row}, channel ${place.col} of the output of ${describeRun(view.request)}`;
  return {
    ...tensor,
    title: `${title}${describeHead(head, view.weights)}`,
    names: {
      rowLabels: isItem ? null : axis.labels,
      colLabels: null,
      rowTick: isItem ? () => "" : String,
      colTick: String,
      rowName: isItem ? () => axis.fullName(place.row) : axis.fullName,
      colName: (col) => `channel ${col}`,
    },
  };
}

/** Describes how far gradients and finite differences are apart, as nodes of a sentence. */
function describeCheck(view, tensors) {
  const reason = reasonWithoutDifferences(view);
  if (reason) return [`${reason}: there is no finite difference to compare with.`];
  const entries = tensors.flatMap((tensor) =>
    Array.from(tensor.gradients, (gradient, at) => {
      const gap = Math.abs(gradient - tensor.quotients[at]);
      return { gap, name: entryName(tensor, at) };
    }),
  );
  const checked = entries.filter(({ gap }) => !Number.isNaN(gap));
  if (!checked.length) return ["No gradient is a finite number."];
  const worst = checked.reduce((most, one) => (one.gap > most.gap ? one : most));
  const rest = entries.length - checked.length;
  const part = rest ? ` The ${checked.length} largest of ${entries.length} were compared.` : "";
  return [
    "Between a gradient and its finite difference, both in float64, the largest difference is ",
    h("strong", {}, formatNumber(worst.gap, 2)),
    ` (${worst.name}).${part}`,
  ];
}
