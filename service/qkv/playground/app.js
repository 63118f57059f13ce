// Builds the page: sends a request for the state of its controls and draws the response.

import { get } from "./api.js";
import { createCapturedPanel } from "./captured/captured_panel.js";
import { createCheckpointPanel } from "./checkpoint/checkpoint_panel.js";
import { createLoadedLayers } from "./checkpoint/loaded_layers.js";
import { createComparePanel } from "./compare/compare_panel.js";
import { createSweepPanel } from "./compare/sweep_panel.js";
import { createDifferencePanel } from "./compare/weights_difference.js";
import { createRequestPanel } from "./copy/request_panel.js";
import { debounce, findById, setText } from "./dom.js";
import { clearProblems, showProblem } from "./error_messages.js";
import { listenToTerms } from "./glossary.js";
import { createExampleList } from "./inputs/example_list.js";
import { EXAMPLES, findExample } from "./inputs/examples.js";
import { formatLabels, matchLabels, parseLabels } from "./inputs/labels.js";
import { createControls, showCausalNote } from "./inputs/parameter_form.js";
import { applyRequest } from "./inputs/pasted_request.js";
import { createTensorList, inputFiles, keptLayer, missingInputs } from "./inputs/tensor_list.js";
import { describeOutput, describeRun, missingMessage, showKind } from "./run_summary.js";
import { listenToTheme } from "./theme.js";
import { createTimingList } from "./timing.js";
import { createHeadGrid } from "./weights/head_grid.js";
import { Heatmap } from "./weights/heatmap.js";
import { outputMatrix, weightsMatrix } from "./weights/heatmap_data.js";
import { createReadout } from "./weights/heatmap_readout.js";
import { createRowSelection } from "./weights/row_selection.js";
import { buildRequest, fetchView, heatmapBody } from "./weights/weights_request.js";
import { showWeightsTable } from "./weights/weights_table.js";

const state = {
  variants: new Map(),
  variant: null,
  tensors: [],
  labels: [],
  layer: null,
  layerError: null, // of a layer of a checkpoint that cannot be sent
  parameters: {},
  dtype: null, // of a pasted request
  pool: null, // bins of a pasted request
  example: null, // id of the example, null for other tensors
  head: 0,
  selectedRow: null,
};
const main = document.querySelector("main");
let view = null;
let running = null; // AbortController of the current or next run

const announce = (text) => setText(findById("announcements"), text);
const showReadout = createReadout(announce);
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
  showRequest("comparison", { path: "/v1/compare", body }),
);
const sweepPanel = createSweepPanel(findById("sweep"), state, {
  announce,
  onRequest: (body) => showRequest("sweep", { path: "/v1/sweep", body }),
});
const runDebounced = debounce(() => run(), 120);
const runSoon = () => {
  expectRun();
  runDebounced();
};
const NEW_TENSORS = { labels: [], head: 0, selectedRow: null };
const NO_REQUEST = { layer: null, dtype: null, pool: null };
const tensorList = createTensorList(
  state,
  (tensors, { isAdded, request }) => {
    if (request) checkpoint.close();
    const kept = { tensors, layer: keptLayer(state), example: null };
    Object.assign(state, isAdded ? {} : NEW_TENSORS, NO_REQUEST, kept);
    if (!isAdded && !state.layer) state.parameters = {};
    const note = request && applyRequest(state, request, buildRequest);
    applyOwn(note, note ? "note" : "hint");
    if (note) announce(note);
  },
  () => {
    state.example = null;
    applyState();
  },
  async (files) => checkpoint.take(await captured.take(files)),
);
const checkpoint = createCheckpointPanel(state, {
  onChange: expectRun,
  onLayer: (isNew) => {
    if (isNew) Object.assign(state, NEW_TENSORS, { dtype: null, pool: null, example: null });
    if (!("query" in state.variant.inputs)) state.variant = state.variants.get("softmax");
    applyOwn("A layer of a checkpoint. Upload hidden states as x, or use random ones.");
  },
  onClose: () => useExample(EXAMPLES[0]),
  onError: tensorList.showError,
  takeOthers: (files) => captured.take(files),
  announce,
});
const loadedLayers = createLoadedLayers((chosen) => {
  if (!chosen) return useExample(EXAMPLES[0]);
  checkpoint.close();
  Object.assign(state, NEW_TENSORS, NO_REQUEST, chosen, { example: null });
  if (!("query" in state.variant.inputs)) state.variant = state.variants.get("softmax");
  applyOwn("A loaded layer. Upload hidden states as x, or use random ones.");
});
const captured = createCapturedPanel(state, {
  onHead: ({ tensors, parameters, note }) => {
    checkpoint.close();
    const added = Object.entries(tensors).map(([name, tensor]) => ({ name, role: name, tensor }));
    Object.assign(state, NEW_TENSORS, NO_REQUEST, { tensors: added, parameters, example: null });
    state.variant = state.variants.get("softmax");
    applyOwn(note);
    findById("weights").focus();
  },
  announce,
});

/** Updates the controls to new tensors and a note on them, then runs. */
function applyOwn(note, className = "hint") {
  findById("labels").value = formatLabels(state.labels);
  findById("example").value = state.example ?? "";
  setText(findById("example-about"), note);
  findById("example-about").className = className;
  applyState();
}

/** Updates the controls to the state, then runs. */
function applyState() {
  runSoon();
  const { variant } = state;
  findById("variant").value = variant.variant;
  setText(findById("variant-about"), variant.summary);
  setText(findById("formula"), variant.formula);
  const updateNote = () => {
    if (!missingInputs(state).length) showCausalNote(buildRequest(state), state.parameters);
  };
  findById("parameters").replaceChildren(
    createControls(variant.parameters.properties, state.parameters, () => {
      updateNote();
      runSoon();
    }),
  );
  updateNote();
  tensorList.show();
  loadedLayers.show(state.layer);
}

function useExample(example) {
  const { tensors, labels, variant, parameters, layer = null, selectedRow = 1 } = example.create();
  Object.assign(state, NO_REQUEST, { tensors, labels, layer, selectedRow, head: 0 });
  state.example = example.id;
  state.parameters = { ...parameters };
  state.variant = state.variants.get(variant) ?? [...state.variants.values()][0];
  checkpoint.close();
  applyOwn(example.about);
}

/** Selects a variant; replaces an example that lacks the variant's inputs by one that has them. */
function chooseVariant(name) {
  state.variant = state.variants.get(name);
  const isMissing = missingInputs(state).length > 0 && state.example;
  const hasInputs = (tensors) => !missingInputs({ ...state, tensors, layer: null }).length;
  const replacement = isMissing && findExample(hasInputs);
  if (replacement) {
    useExample(replacement);
    state.variant = state.variants.get(name);
  }
  applyState();
}

/** Forgets the current or waiting run, which is out of date. The page is busy until the next. */
function expectRun() {
  view = null; // its numbers must not get the labels of the next
  showWeightsTable(null);
  runDebounced.cancel();
  running?.abort();
  running = new AbortController();
  if (state.variant) main.setAttribute("aria-busy", "true");
  return running.signal;
}

async function run() {
  if (!state.variant) return loadCatalogue();
  const signal = expectRun();
  try {
    if (state.layerError) throw state.layerError;
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
    showRequest("weights", { path: request.path, body: heatmapBody(request) });
    setText(findById("status"), describeRun(view));
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

function draw() {
  if (!view) return;
  showKind(view.kind);
  const { rows: queries, cols: keys } = view.request;
  setText(findById("labels-note"), matchLabels(state.labels, queries, keys).note);
  findById("weights").classList.toggle("without", !view.weights);
  if (view.weights) {
    const matrix = weightsMatrix(view, state.head, state.labels);
    map.show(matrix);
    showHeads(view.weights, state.head);
    showWeightsTable(matrix);
    rowSelection.draw(view);
  }
  output.show(outputMatrix(view, state.head, state.labels));
  setText(findById("output-about"), describeOutput(view, state.head));
}

function listen() {
  findById("variant").addEventListener("change", (event) => chooseVariant(event.target.value));
  findById("labels").addEventListener("input", (event) => {
    state.labels = parseLabels(event.target.value);
    draw();
    differencePanel.draw();
  });
  findById("request-form").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
}

function start() {
  listenToTheme(findById("theme"), () => {
    for (const heatmap of [map, output, differencePanel.map, captured]) heatmap.repaint();
    draw();
  });
  const isNarrow = matchMedia("(max-width: 62rem)").matches; // there, the map is more important
  for (const part of document.querySelectorAll("form details")) part.open = !isNarrow;
  listen();
  listenToTerms();
  createExampleList(state, useExample, tensorList.openPaste);
  loadCatalogue();
}

/** Loads the catalogue of variants, then the first example. */
async function loadCatalogue() {
  try {
    const { variants } = await get("/v1/variants");
    for (const variant of variants) state.variants.set(variant.variant, variant);
    await loadedLayers.load();
  } catch (error) {
    return showProblem(error);
  }
  findById("variant").append(...[...state.variants.keys()].map((name) => new Option(name)));
  sweepPanel.update();
  useExample(EXAMPLES[0]);
}

start();
