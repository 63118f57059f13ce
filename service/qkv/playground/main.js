// The page: what stands in its controls becomes a request, and what comes back is drawn.

import { get } from "./api.js";
import { comparison } from "./comparison.js";
import { difference } from "./difference.js";
import { find, number, say, soon, time } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { controls } from "./form.js";
import { headGrid, headName, stackName } from "./heads.js";
import { rowKept } from "./held.js";
import { filesOf, inputList, lacking } from "./inputs.js";
import { Matrix } from "./matrix.js";
import { clearProblems, showProblem } from "./problem.js";
import { requestPanel } from "./request.js";
import { outputShown, weightsShown } from "./shown.js";
import { sweepPanel } from "./sweep.js";
import { fillWeights } from "./table.js";
import { themed } from "./theme.js";
import { timings } from "./timing.js";
import { asked, look, shownBody } from "./view.js";

const state = {
  variants: new Map(),
  variant: null,
  tensors: [],
  labels: [],
  layer: null,
  parameters: {},
  example: null, // its id, while the tensors are its own
  head: 0,
  held: null,
};
let view = null;
let running = null;

const speak = (text) => say(find("spoken"), text);
const ran = timings(find("timing"));
const requests = requestPanel(find("request"), speak);
const showRequest = (what, request) =>
  requests(what, { ...request, files: filesOf(state.tensors) });
const showHeads = headGrid(find("heads"), (head) => {
  state.head = head;
  draw();
  differ.draw();
});
const row = rowKept(find("row"), state, {
  marked: (bin) => map.hold(bin),
  ran,
  failed: showProblem,
  speak,
});
const map = new Matrix(find("map"), {
  hasRoot: true,
  pointed: (cell, byKey) => {
    readOut(map, cell, byKey);
    if (cell) row.point(cell.row);
  },
  held: (bin) => row.hold(bin),
});
const output = new Matrix(find("output"), {
  most: 320,
  pointed: (cell, byKey) => readOut(output, cell, byKey, " "),
});
const differ = difference(find("difference"), state, { ran, speak, matrix: readOut });
const compare = comparison(find("comparison"), state, (body) =>
  showRequest("the comparison", { path: "/v1/compare", body }),
);
const sweep = sweepPanel(find("sweep"), state, {
  speak,
  asks: (body) => showRequest("the sweep", { path: "/v1/sweep", body }),
});
const runSoon = soon(() => run(), 120);
const showInputs = inputList(
  state,
  (tensors, isMore) => {
    const own = { labels: [], parameters: {}, head: 0, held: null };
    Object.assign(state, isMore ? {} : own, { tensors, layer: null, example: null });
    find("labels").value = state.labels.join(" ");
    find("example").value = "";
    say(find("example-about"), null);
    fitted();
  },
  () => {
    state.example = null;
    fitted();
  },
);

/** Shows what the state is in the controls, and runs it. */
function fitted() {
  const { variant } = state;
  find("variant").value = variant.variant;
  say(find("variant-about"), variant.summary);
  say(find("formula"), variant.formula);
  find("parameters").replaceChildren(
    controls(variant.parameters.properties, state.parameters, runSoon),
  );
  showInputs();
  runSoon();
}

function take(example) {
  const { tensors, labels, variant, parameters, layer = null, held = 1 } = example.make();
  Object.assign(state, { tensors, labels, layer, held, example: example.id, head: 0 });
  state.parameters = { ...parameters };
  state.variant = state.variants.get(variant) ?? [...state.variants.values()][0];
  find("example").value = example.id;
  find("labels").value = labels.join(" ");
  say(find("example-about"), example.about);
  fitted();
}

/** Another variant; an example that it cannot take makes way for one that it can. */
function pick(name) {
  state.variant = state.variants.get(name);
  const other = lacking(state).length > 0 && state.example && fitting(state.variant);
  if (other) {
    take(other);
    state.variant = state.variants.get(name);
  }
  fitted();
}

function fitting(variant) {
  return EXAMPLES.find((example) => {
    const { tensors, layer = null } = example.make();
    return !layer && !lacking({ tensors, variant, layer }).length;
  });
}

async function run() {
  if (!state.variant) return load();
  running?.abort();
  running = new AbortController();
  const { signal } = running;
  const main = document.querySelector("main");
  main.setAttribute("aria-busy", "true");
  try {
    const lacks = lacking(state);
    if (lacks.length) throw new Error(needed(state.variant.variant, lacks));
    const ask = asked(state);
    const came = await look(ask, signal, ran);
    if (signal.aborted) return;
    clearProblems();
    main.classList.remove("stale");
    view = came;
    state.head = Math.min(state.head, (view.weights?.stack ?? 1) - 1);
    if (state.held >= ask.rows) state.held = null;
    showRequest("the weights", { path: ask.path, body: shownBody(ask) });
    say(find("status"), summary());
    draw();
    differ.update(view);
    compare.update(ask);
    sweep.update();
    if (!came.later) return;
    came.stats = await came.later();
    if (!signal.aborted) draw();
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    main.classList.add("stale");
    clearProblems();
    showProblem(error);
    say(find("status"), null);
  } finally {
    if (running.signal === signal) main.removeAttribute("aria-busy");
  }
}

function needed(variant, names) {
  const [last, ...before] = [...names].reverse();
  const list = before.length ? `${before.reverse().join(", ")} and ${last}` : last;
  return `${variant} still needs ${list}: upload ${names.length > 1 ? "them" : "it"} too`;
}

function summary() {
  const { ask, timing, weights } = view;
  const queries = ask.rows === 1 ? "1 query" : `${ask.rows} queries`;
  const keys = ask.cols === 1 ? "1 key" : `${ask.cols} keys`;
  const heads = weights?.stack > 1 ? `, ${stackName(weights)}` : "";
  const took = time(timing.total_ms);
  return `${ask.variant.variant}: ${queries}, ${keys}${heads}; ${took} at the service.`;
}

function draw() {
  if (!view) return;
  say(find("kind"), view.kind);
  find("weights").classList.toggle("without", !view.weights);
  if (view.weights) {
    const shown = weightsShown(view, state.head, state.labels);
    map.show(shown);
    showHeads(view.weights, state.head);
    if (find("table").open) fillWeights(find("table").lastElementChild, shown);
    row.draw(view);
  }
  output.show(outputShown(view, state.head, state.labels));
  const { stack, rows, cols } = view.output;
  const which =
    stack > 1 ? `${headName(Math.min(state.head, stack - 1), view.output)} of ${stack}, ` : "";
  say(find("output-about"), `${which}${rows} × ${cols}`);
}

/** Says what is pointed at, below a heat map; aloud where the keys went there. */
function readOut(matrix, cell, byKey, arrow = " → ") {
  if (!cell) return matrix.readOut(null);
  const { shown } = matrix;
  const value = number(shown.numbers[cell.row * shown.cols + cell.col]);
  const words = `${shown.rowName(cell.row)}${arrow}${shown.colName(cell.col)}`;
  matrix.readOut(words, value);
  if (byKey) speak(`${words.replace("→", "to")}: ${value}`);
}

function listen() {
  find("example").addEventListener("change", (event) => {
    const example = EXAMPLES.find(({ id }) => id === event.target.value);
    if (example) take(example);
  });
  find("variant").addEventListener("change", (event) => pick(event.target.value));
  find("labels").addEventListener("input", (event) => {
    state.labels = event.target.value.split(/\s+/).filter(Boolean);
    draw();
    differ.draw();
  });
  find("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  find("table").addEventListener("toggle", () => draw());
}

function start() {
  themed(find("theme"), () => {
    for (const matrix of [map, output, differ.map]) matrix.paint();
    draw();
  });
  if (matchMedia("(max-width: 62rem)").matches) {
    for (const part of find("ask").querySelectorAll("details")) part.open = false; // the map comes first
  }
  listen();
  find("example").append(
    new Option("Your own", "", false, false),
    ...EXAMPLES.map(({ id, title }) => new Option(title, id)),
  );
  load();
}

/** Takes what variants there are from the catalogue, and the first example. */
async function load() {
  try {
    const { variants } = await get("/v1/variants");
    for (const variant of variants) state.variants.set(variant.variant, variant);
  } catch (error) {
    return showProblem(error);
  }
  find("variant").append(...[...state.variants.keys()].map((name) => new Option(name)));
  sweep.update();
  take(EXAMPLES[0]);
}

start();
