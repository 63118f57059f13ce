// Where the weights of two variants differ: one map minus the other.

import { post } from "./api.js";
import { fixed, h, say } from "./dom.js";
import { headName } from "./heads.js";
import { Matrix } from "./matrix.js";
import { matrixOf } from "./shown.js";
import { fromWire, toNumbers } from "./tensors.js";
import { asked, comparable, firstOf, shownBody } from "./view.js";

/**
 * The panel of the difference.
 *
 * @param {HTMLElement} root
 * @param {Object} state of the page
 * @param {{ran: Function, matrix: Function}} to told of calls, and of cells that are pointed at
 */
export function difference(root, state, to) {
  const select = h("select", { id: "other", change: () => run() });
  const label = h("label", { for: "other" });
  const about = h("p", { class: "hint", role: "status" });
  const error = h("p", { class: "error", hidden: true });
  const figure = h("figure", { class: "map", "aria-label": "Difference map" });
  const field = h("div", { class: "field inline" }, label, select);
  root.append(
    h("h3", {}, "Difference map"),
    field,
    error,
    h("div", { class: "weights" }, figure, h("div", { class: "beside" }, about)),
  );
  const map = new Matrix(figure, {
    most: 480,
    pointed: (cell, byKey) => to.matrix(map, cell, byKey),
  });
  let view = null;
  let other = null;
  let running = null;

  const draw = () => {
    if (!view || !other) return;
    const numbers = view.weights.numbers.map((value, at) => value - other.numbers[at]);
    const shown = matrixOf(view, state.head, state.labels, numbers);
    const names = [view.ask.variant.variant, other.name];
    map.show({
      ...shown,
      label: `${names.join(" minus ")}: ${shown.rows} by ${shown.cols}. Arrow keys move.`,
    });
    about.textContent = said(shown, names, {
      rows: view.ask.rows,
      isPooled: view.ask.bins !== null,
      head: view.weights.stack > 1 ? ` of ${headName(state.head, view.weights)}` : "",
    });
  };
  const run = async () => {
    running?.abort();
    running = new AbortController();
    const { signal } = running;
    const variant = state.variants.get(select.value);
    try {
      const ask = asked(state, variant);
      const body = { ...shownBody(ask), outputs: ["weights"] };
      const { answer, took } = await post(ask.path, body, signal);
      to.ran({
        variant: variant.variant,
        what: "weights, to compare",
        timing: answer.timing,
        took,
      });
      const numbers = toNumbers(fromWire(answer.outputs.weights));
      if (signal.aborted || numbers.length !== view.weights.numbers.length) return;
      other = { name: variant.variant, numbers };
      say(error, null);
      figure.hidden = false;
      draw();
    } catch (fault) {
      if (fault.name === "AbortError") return;
      say(error, fault.detail ?? fault.message);
      figure.hidden = true;
      about.textContent = "";
    }
  };

  return {
    map,
    draw,
    update: (came) => {
      view = came;
      const names = comparable(state, view.ask.variant).map(({ variant }) => variant);
      root.hidden = !view.weights || !names.length;
      if (root.hidden) return;
      const kept = names.includes(select.value)
        ? select.value
        : names.includes("linear")
          ? "linear"
          : names[0];
      select.replaceChildren(...names.map((name) => new Option(name, name, false, name === kept)));
      label.textContent = `${view.ask.variant.variant} minus`;
      run();
    },
  };
}

/**
 * How far the rows lie apart, in words. What differs within a pooled cell cancels there, so that
 * the rows themselves lie at least as far apart as their bins.
 */
function said({ rows, cols, numbers, rowName }, names, { rows: length, isPooled, head }) {
  let [sum, worst, at] = [0, -1, 0];
  for (let row = 0; row < rows; row += 1) {
    let moved = 0;
    for (let col = 0; col < cols; col += 1) moved += Math.abs(numbers[row * cols + col]) / 2;
    sum += moved * (firstOf(row + 1, rows, length) - firstOf(row, rows, length));
    if (moved > worst) [worst, at] = [moved, row];
  }
  const [first, second] = names;
  const colours = `Blue where ${first} has more weight, orange where ${second} has.`;
  const [mean, most] = [fixed(sum / length, 3), fixed(worst, 3)];
  if (!isPooled) {
    return `${colours} The total variation of a row${head} is ${mean} on average, at most ${most}: ${rowName(at)}.`;
  }
  return (
    `${colours} Between these pooled cells${head}, total variation is ${mean} on average, at most ` +
    `${most}: ${rowName(at)}. These are lower bounds: row by row it is as much or more, for what ` +
    "differs within a cell cancels. Side by side, below, compares the rows themselves."
  );
}
