// A sweep over sequence lengths, drawn while it runs.

import { events } from "./api.js";
import { drawSweep, fillTable } from "./chart.js";
import { h, say } from "./dom.js";
import { whoIsFaster } from "./figures.js";
import { choice } from "./form.js";

const LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];
const FIELDS = [
  ["heads", "Heads", 4, 1, 64],
  ["width", "Width", 64, 1, 512],
  ["repeats", "Repeats", 5, 1, 50],
];
const USUAL = ["softmax", "linear", "efficient", "taylor"];

/**
 * The panel of the sweep.
 *
 * @param {HTMLElement} root
 * @param {Object} state of the page
 * @param {Object} to
 * @param {(text: string) => void} to.speak
 * @param {(body: Object) => void} to.asks told of each request
 */
export function sweepPanel(root, state, { speak, asks }) {
  const boxes = h("div", { class: "boxes", role: "group", "aria-label": "Variants to measure" });
  const longest = h(
    "select",
    { id: "sweep-longest" },
    ...LENGTHS.slice(3).map((n) => new Option(n.toLocaleString("en"), n, n === 2048, n === 2048)),
  );
  const inputs = FIELDS.map(([name, , value, min, max]) =>
    h("input", { id: `sweep-${name}`, type: "number", value, min, max, step: 1 }),
  );
  const fields = FIELDS.map(([name, label], i) => field(`sweep-${name}`, label, inputs[i]));
  const button = h(
    "button",
    { type: "button", class: "primary", click: () => (running ? running.abort() : run()) },
    "Measure",
  );
  const progress = h("progress", { "aria-label": "Progress of the sweep", hidden: true });
  const status = h("p", { class: "hint", role: "status" });
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const chart = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const table = h("table", { class: "numbers" });
  const details = h(
    "details",
    { hidden: true },
    h("summary", {}, "The times as a table"),
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of the times" },
      table,
    ),
  );
  chart.id = "chart";
  root.append(
    boxes,
    h("div", { class: "row fields" }, field("sweep-longest", "Up to", longest), ...fields, button),
    progress,
    status,
    error,
    h("figure", { class: "chart" }, chart),
    details,
  );
  const chosen = new Set(USUAL);
  let running = null;
  let drawn = null;
  let known = "";

  const draw = () => {
    if (!drawn) return;
    drawSweep(chart, drawn);
    fillTable(table, drawn);
    details.hidden = false;
  };
  new ResizeObserver(draw).observe(root);

  const run = async () => {
    const names = [...state.variants.keys()].filter((name) => chosen.has(name));
    const body = asked(names, Number(longest.value), inputs, state);
    asks(body);
    drawn = { cells: [], variants: names, crossovers: [], lengths: body.lengths };
    running = new AbortController();
    button.textContent = "Stop";
    progress.hidden = false;
    progress.removeAttribute("value");
    say(error, null);
    draw();
    try {
      for await (const { event, data } of events("/v1/sweep", body, running.signal))
        hear(event, data);
    } catch (fault) {
      if (fault.name === "AbortError") status.textContent = "Stopped.";
      else say(error, fault.detail ?? fault.message);
    } finally {
      running = null;
      button.textContent = "Measure";
      progress.hidden = true;
    }
  };
  const hear = (event, data) => {
    if (event === "progress") {
      progress.max = data.total;
      progress.value = data.done;
      status.textContent = `${data.done} of ${data.total}: ${data.variant} at ${data.length.toLocaleString("en")}`;
    } else if (event === "cell") {
      drawn.cells.push(data);
    } else if (event === "done") {
      drawn.crossovers = data.crossovers;
      status.textContent = `${drawn.cells.length} measured. ${whoIsFaster(drawn)}`;
      speak("The sweep is done");
    } else if (event === "problem" || event === "error") {
      say(error, data.detail ?? "The sweep failed.");
    }
    draw();
  };

  return {
    update: () => {
      const able = [...state.variants.values()]
        .filter(({ inputs: taking }) => "value" in taking)
        .map(({ variant }) => variant);
      if (known === able.join()) return;
      known = able.join();
      boxes.replaceChildren(...able.map((name) => box(name, chosen)));
      status.textContent = "Each length is measured a few times, between other callers' requests.";
    },
  };
}

function asked(names, longest, inputs, state) {
  const sizes = Object.fromEntries(FIELDS.map(([name], i) => [name, Number(inputs[i].value)]));
  const variants = names.map((name) => choice(state.variants.get(name), state.parameters));
  return { variants, lengths: LENGTHS.filter((length) => length <= longest), ...sizes };
}

function field(id, label, input) {
  return h("div", { class: "field" }, h("label", { for: id }, label), input);
}

function box(name, chosen) {
  const id = `sweep-with-${name}`;
  const input = h("input", {
    type: "checkbox",
    id,
    change: () => (input.checked ? chosen.add(name) : chosen.delete(name)),
  });
  input.checked = chosen.has(name);
  return h("div", { class: "check" }, input, h("label", { for: id }, name));
}
