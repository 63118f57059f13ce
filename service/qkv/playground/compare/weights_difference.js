// Draws the difference of the weights of two variants.

import { post } from "../api.js";
import { AUTO_RUN_BYTES, layerBytes } from "../data/request_body.js";
import { fromWire, toNumbers } from "../data/tensors.js";
import { formatFixed, h, setText } from "../dom.js";
import { describeRandomInputs } from "../run_summary.js";
import { headName } from "../weights/head_grid.js";
import { Heatmap } from "../weights/heatmap.js";
import { describeHead, headMatrix } from "../weights/heatmap_data.js";
import {
  buildRequest,
  comparableVariants,
  firstOfBin,
  heatmapBody,
} from "../weights/weights_request.js";

/**
 * Creates the panel.
 *
 * @param {HTMLElement} root
 * @param {Object} state of the page
 * @param {{onCall, onPoint, onChoose}} callbacks called for requests, for the cursor, and when the
 *   user chose another variant
 */
export function createDifferencePanel(root, state, callbacks) {
  const select = h("select", {
    id: "other",
    change: () => {
      state.difference = select.value;
      callbacks.onChoose();
      run();
    },
  });
  const label = h("label", { for: "other" });
  const note = h("p", { class: "note", hidden: true });
  const about = h("p", { class: "hint", role: "status" });
  const error = h("p", { class: "error", hidden: true });
  const figure = h("figure", { class: "map", "aria-label": "Difference map" });
  const field = h("div", { class: "field inline" }, label, select);
  root.append(
    h("h3", {}, "Difference map"),
    field,
    error,
    h("div", { class: "weights" }, figure, h("div", { class: "beside" }, note, about)),
  );
  const map = new Heatmap(figure, {
    name: "the difference",
    maxHeight: 480,
    onPoint: (cell, byKey) => callbacks.onPoint(map, cell, byKey),
  });
  let view = null;
  let other = null;
  let difference = null; // of the weights of view and other
  let running = null;

  const draw = () => {
    if (!view || !other) return;
    const subtract = (value, at) => value - other.numbers[at];
    if (difference?.view !== view || difference.other !== other)
      difference = { view, other, numbers: view.weights.numbers.map(subtract) };
    const matrix = headMatrix(view, state.head, state.labels, difference.numbers);
    const variants = [view.request.variant, other.variant];
    const names = variants.map(({ variant }) => variant);
    map.show({
      ...matrix,
      title: `Weights of ${names.join(" minus ")}${describeHead(state.head, view.weights)}`,
      label: `${names.join(" minus ")}: ${matrix.rows} by ${matrix.cols}.`,
    });
    setText(note, describeRandomInputs(state, variants));
    about.textContent = describeDifference(matrix, names, {
      rows: view.request.rows,
      isPooled: view.request.bins !== null,
      head:
        view.weights.stack > 1 || view.weights.place
          ? ` of ${headName(state.head, view.weights)}`
          : "",
    });
  };
  const run = async () => {
    running?.abort();
    running = new AbortController();
    const { signal } = running;
    const variant = state.variants.get(select.value);
    if (!variant) return;
    try {
      const request = buildRequest(state, variant);
      const body = { ...heatmapBody(request), outputs: ["weights"] };
      const { result, elapsedMs } = await post(request.path, body, signal);
      callbacks.onCall({
        variant: variant.variant,
        what: "weights for the difference",
        timing: result.timing,
        elapsedMs,
      });
      const numbers = toNumbers(fromWire(result.outputs.weights));
      if (signal.aborted || numbers.length !== view.weights.numbers.length) return;
      other = { variant, numbers };
      setText(error, null);
      figure.hidden = false;
      draw();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      setText(error, problem.detail ?? problem.message);
      figure.hidden = true;
      about.textContent = "";
      setText(note, null);
    }
  };

  return {
    map,
    draw,
    update: (newView) => {
      view = newView;
      const names = comparableVariants(state, view.request.variant).map(({ variant }) => variant);
      root.hidden = !view.weights || !names.length;
      if (root.hidden) return;
      const selected = names.includes(state.difference)
        ? state.difference
        : names.includes("linear")
          ? "linear"
          : names[0];
      select.replaceChildren(
        ...names.map((name) => new Option(name, name, false, name === selected)),
      );
      label.textContent = `${view.request.variant.variant} minus`;
      if (layerBytes(state.layer) > AUTO_RUN_BYTES) {
        select.prepend(new Option("choose", "", true, true));
        [other, figure.hidden] = [null, true];
        about.textContent = "The layer is sent again for the variant that you choose.";
        return;
      }
      return run();
    },
  };
}

/**
 * Describes the total variation of the rows. Differences within a pooled cell cancel: the pooled
 * figures are lower bounds.
 */
function describeDifference(
  { rows, cols, numbers, rowName },
  names,
  { rows: length, isPooled, head },
) {
  let [sum, worst, at] = [0, -1, 0];
  let [queries, nanQueries] = [0, 0];
  for (let row = 0; row < rows; row += 1) {
    let distance = 0;
    for (let col = 0; col < cols; col += 1) distance += Math.abs(numbers[row * cols + col]) / 2;
    const height = firstOfBin(row + 1, rows, length) - firstOfBin(row, rows, length);
    if (Number.isNaN(distance)) {
      nanQueries += height;
      continue;
    }
    queries += height;
    sum += distance * height;
    if (distance > worst) [worst, at] = [distance, row];
  }
  const [first, second] = names;
  const rowCount = `${nanQueries} ${nanQueries === 1 ? "row has" : "rows have"}`;
  const nanNote = nanQueries ? ` ${rowCount} NaN, and no part in the figures.` : "";
  const colours = `Blue where ${first} has more weight, orange where ${second} has.${nanNote}`;
  if (!queries) return colours;
  const [mean, max] = [formatFixed(sum / queries, 3), formatFixed(worst, 3)];
  if (!isPooled) {
    return `${colours} Total variation of a row${head}: ${mean} on average, at most ${max} (${rowName(at)}).`;
  }
  return (
    `${colours} Total variation between the pooled cells${head}: ${mean} on average, at most ` +
    `${max} (${rowName(at)}). These are lower bounds: differences within a cell cancel. ` +
    "The metrics below compare single rows."
  );
}
