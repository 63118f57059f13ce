// The page: what stands in its controls becomes a request, and what comes back is drawn.

import { get } from "./api.js";
import { createComparePanel } from "./compare/compare_panel.js";
import { createSweepPanel } from "./compare/sweep_panel.js";
import { createDifferencePanel } from "./compare/weights_difference.js";
import { createRequestPanel } from "./copy/request_panel.js";
import { debounce, findById, formatNumber, formatTime, setText } from "./dom.js";
import { clearProblems, showProblem } from "./error_messages.js";
import { EXAMPLES } from "./inputs/examples.js";
import { createControls } from "./inputs/parameter_form.js";
import { createTensorList, inputFiles, missingInputs } from "./inputs/tensor_list.js";
import { listenToTheme } from "./theme.js";
import { createTimingList } from "./timing.js";
import { createHeadGrid, describeStack, headName } from "./weights/head_grid.js";
import { Heatmap } from "./weights/heatmap.js";
import { outputMatrix, weightsMatrix } from "./weights/heatmap_data.js";
import { createRowSelection } from "./weights/row_selection.js";
import { buildRequest, fetchView, heatmapBody } from "./weights/weights_request.js";
import { fillWeightsTable } from "./weights/weights_table.js";

const state = {
  variants: new Map(),
  variant: null,
  tensors: [],
  labels: [],
  layer: null,
  parameters: {},
  example: null, // its id, while the tensors are its own
  head: 0,
  selectedRow: null,
};
let view = null;
let running = null;

const announce = (text) => setText(findById("announcements"), text);
const onCall = createTimingList(findById("timing"));
const updateRequestPanel = createRequestPanel(findById("request"), announce);
const showRequest = (purpose, request) =>
  updateRequestPanel(purpose, { ...request, files: inputFiles(state.tensors) });
const showHeads = createHeadGrid(findById("heads"), (head) => {
  state.head = head;
  draw();
  differencePanel.draw();
});
const rowSelection = createRowSelection(findById("row"), state, {
  onMark: (bin) => map.markRow(bin),
  onCall,
  onError: showProblem,
  announce,
});
const map = new Heatmap(findById("map"), {
  hasRoot: true,
  onPoint: (cell, byKey) => {
    showReadout(map, cell, byKey);
    if (cell) rowSelection.point(cell.row);
  },
  onSelect: (bin) => rowSelection.select(bin),
});
const output = new Heatmap(findById("output"), {
  maxHeight: 320,
  onPoint: (cell, byKey) => showReadout(output, cell, byKey, " "),
});
const differencePanel = createDifferencePanel(findById("difference"), state, {
  onCall,
  onPoint: showReadout,
});
const comparePanel = createComparePanel(findById("comparison"), state, (body) =>
  showRequest("the comparison", { path: "/v1/compare", body }),
);
const sweepPanel = createSweepPanel(findById("sweep"), state, {
  announce,
  onRequest: (body) => showRequest("the sweep", { path: "/v1/sweep", body }),
});
const runDebounced = debounce(() => run(), 120);
const showInputs = createTensorList(
  state,
  (tensors, isAdded) => {
    const cleared = { labels: [], parameters: {}, head: 0, selectedRow: null };
    Object.assign(state, isAdded ? {} : cleared, { tensors, layer: null, example: null });
    findById("labels").value = state.labels.join(" ");
    findById("example").value = "";
    setText(findById("example-about"), null);
    applyState();
  },
  () => {
    state.example = null;
    applyState();
  },
);

/** Shows what the state is in the controls, and runs it. */
function applyState() {
  const { variant } = state;
  findById("variant").value = variant.variant;
  setText(findById("variant-about"), variant.summary);
  setText(findById("formula"), variant.formula);
  findById("parameters").replaceChildren(
    createControls(variant.parameters.properties, state.parameters, runDebounced),
  );
  showInputs();
  runDebounced();
}

function useExample(example) {
  const { tensors, labels, variant, parameters, layer = null, selectedRow = 1 } = example.create();
  Object.assign(state, { tensors, labels, layer, selectedRow, example: example.id, head: 0 });
  state.parameters = { ...parameters };
  state.variant = state.variants.get(variant) ?? [...state.variants.values()][0];
  findById("example").value = example.id;
  findById("labels").value = labels.join(" ");
  setText(findById("example-about"), example.about);
  applyState();
}

/** Another variant; an example that it cannot take makes way for one that it can. */
function chooseVariant(name) {
  state.variant = state.variants.get(name);
  const isMissing = missingInputs(state).length > 0 && state.example;
  const replacement = isMissing && findExample(state.variant);
  if (replacement) {
    useExample(replacement);
    state.variant = state.variants.get(name);
  }
  applyState();
}

function findExample(variant) {
  return EXAMPLES.find((example) => {
    const { tensors, layer = null } = example.create();
    return !layer && !missingInputs({ tensors, variant, layer }).length;
  });
}

async function run() {
  if (!state.variant) return loadCatalogue();
  running?.abort();
  running = new AbortController();
  const { signal } = running;
  const main = document.querySelector("main");
  main.setAttribute("aria-busy", "true");
  try {
    const missing = missingInputs(state);
    if (missing.length) throw new Error(missingMessage(state.variant.variant, missing));
    const request = buildRequest(state);
    const newView = await fetchView(request, signal, onCall);
    if (signal.aborted) return;
    clearProblems();
    main.classList.remove("stale");
    view = newView;
    state.head = Math.min(state.head, (view.weights?.stack ?? 1) - 1);
    if (state.selectedRow >= request.rows) state.selectedRow = null;
    showRequest("the weights", { path: request.path, body: heatmapBody(request) });
    setText(findById("status"), summary());
    draw();
    differencePanel.update(view);
    comparePanel.update(request);
    sweepPanel.update();
    if (!newView.fetchStats) return;
    newView.stats = await newView.fetchStats();
    if (!signal.aborted) draw();
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    main.classList.add("stale");
    clearProblems();
    showProblem(error);
    setText(findById("status"), null);
  } finally {
    if (running.signal === signal) main.removeAttribute("aria-busy");
  }
}

function missingMessage(variant, names) {
  const [last, ...before] = [...names].reverse();
  const list = before.length ? `${before.reverse().join(", ")} and ${last}` : last;
  return `${variant} still needs ${list}: upload ${names.length > 1 ? "them" : "it"} too`;
}

function summary() {
  const { request, timing, weights } = view;
  const queries = request.rows === 1 ? "1 query" : `${request.rows} queries`;
  const keys = request.cols === 1 ? "1 key" : `${request.cols} keys`;
  const heads = weights?.stack > 1 ? `, ${describeStack(weights)}` : "";
  const elapsed = formatTime(timing.total_ms);
  return `${request.variant.variant}: ${queries}, ${keys}${heads}; ${elapsed} at the service.`;
}

function draw() {
  if (!view) return;
  setText(findById("kind"), view.kind);
  findById("weights").classList.toggle("without", !view.weights);
  if (view.weights) {
    const matrix = weightsMatrix(view, state.head, state.labels);
    map.show(matrix);
    showHeads(view.weights, state.head);
    if (findById("table").open) fillWeightsTable(findById("table").lastElementChild, matrix);
    rowSelection.draw(view);
  }
  output.show(outputMatrix(view, state.head, state.labels));
  const { stack, rows, cols } = view.output;
  const headNote =
    stack > 1 ? `${headName(Math.min(state.head, stack - 1), view.output)} of ${stack}, ` : "";
  setText(findById("output-about"), `${headNote}${rows} × ${cols}`);
}

/** Says what is pointed at, below a heat map; aloud where the keys went there. */
function showReadout(heatmap, cell, byKey, arrow = " → ") {
  if (!cell) return heatmap.showReadout(null);
  const { matrix } = heatmap;
  const value = formatNumber(matrix.numbers[cell.row * matrix.cols + cell.col]);
  const text = `${matrix.rowName(cell.row)}${arrow}${matrix.colName(cell.col)}`;
  heatmap.showReadout(text, value);
  if (byKey) announce(`${text.replace("→", "to")}: ${value}`);
}

function listen() {
  findById("example").addEventListener("change", (event) => {
    const example = EXAMPLES.find(({ id }) => id === event.target.value);
    if (example) useExample(example);
  });
  findById("variant").addEventListener("change", (event) => chooseVariant(event.target.value));
  findById("labels").addEventListener("input", (event) => {
    state.labels = event.target.value.split(/\s+/).filter(Boolean);
    draw();
    differencePanel.draw();
  });
  findById("request-form").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  findById("table").addEventListener("toggle", () => draw());
}

function start() {
  listenToTheme(findById("theme"), () => {
    for (const heatmap of [map, output, differencePanel.map]) heatmap.repaint();
    draw();
  });
  if (matchMedia("(max-width: 62rem)").matches) {
    for (const part of findById("request-form").querySelectorAll("details")) part.open = false; // the map comes first
  }
  listen();
  findById("example").append(
    new Option("Your own", "", false, false),
    ...EXAMPLES.map(({ id, title }) => new Option(title, id)),
  );
  loadCatalogue();
}

/** Takes what variants there are from the catalogue, and the first example. */
async function loadCatalogue() {
  try {
    const { variants } = await get("/v1/variants");
    for (const variant of variants) state.variants.set(variant.variant, variant);
  } catch (error) {
    return showProblem(error);
  }
  findById("variant").append(...[...state.variants.keys()].map((name) => new Option(name)));
  sweepPanel.update();
  useExample(EXAMPLES[0]);
}

start();
