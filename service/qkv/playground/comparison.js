// Variants side by side: how far each is from an anchor, and what it costs.

import { post } from "./api.js";
import { h, many, number, say, time } from "./dom.js";
import { choice } from "./form.js";
import { inputsOf, wired } from "./inputs.js";
import { able, comparable } from "./view.js";

const SMALL = 65536; // scores; up to here it runs by itself
const SOME = 1024; // rows; of more the service compares so many, unless it is asked for all

const COLUMNS = [
  ["Output", "Relative error", ({ output }) => number(output?.relative_error, 3)],
  ["Output", "Largest error", ({ output }) => number(output?.largest_error, 3)],
  ["Output", "Cosine", ({ output }) => number(output?.cosine, 4)],
  ["Weights", "Total variation", ({ weights }) => both(weights?.total_variation)],
  ["Weights", "Jensen–Shannon", ({ weights }) => both(weights?.js_divergence)],
  ["Weights", "KL", ({ weights }) => both(weights?.kl_divergence)],
  ["Weights", "Rank correlation", ({ weights }) => both(weights?.rank_correlation)],
  ["Weights", "Entropy", ({ weights }) => number(weights?.entropy?.mean, 3)],
  ["Cost", "Time", ({ timing }) => time(timing.median_ms)],
  ["Cost", "Flops", ({ flops }) => many(flops)],
  ["Cost", "Peak memory", ({ peak_bytes: bytes }) => (bytes ? many(bytes, "B") : "–")],
];

/**
 * The panel of the comparison.
 *
 * @param {HTMLElement} root
 * @param {Object} state of the page
 * @param {(body: Object) => void} asks told of each request
 */
export function comparison(root, state, asks) {
  const anchor = h("select", { id: "anchor", change: () => choices() });
  const boxes = h("div", { class: "boxes", role: "group", "aria-label": "Variants to compare" });
  const all = h("input", { type: "checkbox", id: "compare-all-rows" });
  const allRows = h(
    "div",
    { class: "check", hidden: true },
    all,
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
  root.append(
    h("h3", {}, "Side by side"),
    h(
      "div",
      { class: "row" },
      h("div", { class: "field inline" }, h("label", { for: "anchor" }, "Against"), anchor),
      boxes,
      allRows,
      button,
    ),
    status,
    error,
    area,
    notes,
  );
  const left = new Set();
  let running = null;

  const choices = () => {
    const names = able(state).map(({ variant }) => variant);
    const kept = names.includes(anchor.value)
      ? anchor.value
      : names.includes("softmax")
        ? "softmax"
        : names[0];
    anchor.replaceChildren(...names.map((name) => new Option(name, name, false, name === kept)));
    const others = kept
      ? comparable(state, state.variants.get(kept)).map(({ variant }) => variant)
      : [];
    boxes.replaceChildren(
      ...others.map((name) =>
        box(name, !left.has(name), (on) => (on ? left.delete(name) : left.add(name))),
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
    const own = state.variants.get(anchor.value);
    const chosen = comparable(state, own).filter(({ variant }) => !left.has(variant));
    const every = [own, ...chosen];
    const inputs = Object.assign(
      {},
      ...every.map((variant) => inputsOf(state.tensors, variant, state.layer)),
    );
    const body = {
      inputs: wired(inputs),
      anchor: choice(own, state.parameters),
      variants: chosen.map((variant) => choice(variant, state.parameters)),
    };
    if (all.checked && !allRows.hidden) body.rows = null;
    if (state.layer && inputs.x) body.layer = state.layer;
    asks(body);
    status.textContent = "Comparing…";
    try {
      const { answer } = await post("/v1/compare", body, signal);
      if (signal.aborted) return;
      say(error, null);
      area.replaceChildren(table(answer));
      notes.replaceChildren(...(answer.notes ?? []).map((note) => h("li", {}, note)));
      status.textContent =
        "Each with the parameters set above that it takes. The anchor's own error is its distance from float64. Of two numbers the first is the mean over rows, the second the worst row.";
    } catch (fault) {
      if (fault.name === "AbortError") return;
      say(error, fault.detail ?? fault.message);
      status.textContent = "";
    }
  };

  return {
    update: (ask) => {
      running?.abort();
      const isAble = choices();
      allRows.hidden = !isAble || ask.rows <= SOME; // the service compares so few by itself
      if (isAble && ask.rows * ask.cols <= SMALL) return run();
      say(error, null);
      area.replaceChildren();
      notes.replaceChildren();
      status.textContent = isAble
        ? `${ask.rows} × ${ask.cols} weights take a moment to compare: say when.`
        : `No other variant answers the same: none takes all that ${anchor.value} takes of this.`;
    },
  };
}

function box(name, isChecked, changed) {
  const input = h("input", {
    type: "checkbox",
    id: `compare-${name}`,
    change: () => changed(input.checked),
  });
  input.checked = isChecked;
  return h("div", { class: "check" }, input, h("label", { for: `compare-${name}` }, name));
}

function table({ anchor, variants }) {
  const groups = [...new Set(COLUMNS.map(([group]) => group))];
  const width = (group) => COLUMNS.filter(([one]) => one === group).length;
  const line = (entry, isAnchor) =>
    h(
      "tr",
      { class: isAnchor ? "anchor" : "" },
      h(
        "th",
        { scope: "row" },
        entry.variant,
        isAnchor ? h("span", { class: "hint" }, " anchor") : "",
      ),
      ...COLUMNS.map(([, , of]) => h("td", {}, of(entry))),
    );
  return h(
    "table",
    { class: "numbers sides" },
    h("caption", { class: "unseen" }, `Variants against ${anchor.variant}`),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("td", {}),
        ...groups.map((group) => h("th", { scope: "colgroup", colspan: width(group) }, group)),
      ),
      h(
        "tr",
        {},
        h("th", { scope: "col" }, "Variant"),
        ...COLUMNS.map(([, name]) => h("th", { scope: "col" }, name)),
      ),
    ),
    h("tbody", {}, line(anchor, true), ...variants.map((entry) => line(entry, false))),
  );
}

/** The mean over rows, and the worst of them below it. */
function both(pair) {
  if (!pair) return "–";
  const fragment = document.createDocumentFragment();
  fragment.append(number(pair.mean, 3), h("span", { class: "hint" }, number(pair.worst, 3)));
  return fragment;
}
