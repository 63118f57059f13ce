// Builds the page: sends a request for the state of its controls and draws the response.

import { get } from "./api.js";
import { createCapturedPanel } from "./captured/captured_panel.js";
import { createCheckpointPanel } from "./checkpoint/checkpoint_panel.js";
import { createLoadedLayers } from "./checkpoint/loaded_layers.js";
import { createComparisons } from "./compare/comparisons.js";
import { createRequestPanel } from "./copy/request_panel.js";
import { createDetailSections } from "./detail_sections.js";
import { debounce, findById, nextTask, setText } from "./dom.js";
import { clearProblems, showProblem } from "./error_messages.js";
import { listenToTerms } from "./glossary.js";
import { createExampleSelect } from "./inputs/example_select.js";
import { EXAMPLES } from "./inputs/examples.js";
import { formatLabels, labelsOfSequence, parseLabels } from "./inputs/labels.js";
import { applyRequest } from "./inputs/pasted_request.js";
import { inputFiles, missingInputs } from "./inputs/request_inputs.js";
import { createTensorList } from "./inputs/tensor_list.js";
import { keptLayer } from "./inputs/tensor_queue.js";
import { createVariantForm } from "./inputs/variant_form.js";
import { createLessonPanel } from "./lessons/lesson_panel.js";
import { listenToCopyLink } from "./link/copy_link.js";
import { openLink } from "./link/open_link.js";
import { createPageHistory } from "./link/page_history.js";
import { listenToSectionLinks } from "./link/section_links.js";
import { createPageLayout } from "./page_layout.js";
import {
  createState,
  describeExample,
  NEW_TENSORS,
  NO_REQUEST,
  newExample,
  stateOfExample,
} from "./page_state.js";
import { createRepeat } from "./run_repeat.js";
import * as summary from "./run_summary.js";
import { whenReady } from "./service_watch.js";
import { listenToTheme } from "./theme.js";
import { createTimingList } from "./timing.js";
import { createWeightsPanel } from "./weights/weights_panel.js";
import { buildRequest, fetchView, heatmapBody } from "./weights/weights_request.js";

const state = createState();
const main = document.querySelector("main");
let view = null;
let running = null; // AbortController of the current or next run

const announce = (text) => setText(findById("announcements"), text);
const onCall = createTimingList(findById("timing"));
const updateRequestPanel = createRequestPanel(findById("request"), announce);
const showRequest = (purpose, request) =>
  updateRequestPanel(purpose, { ...request, files: inputFiles(state.tensors) });
const pageHistory = createPageHistory(
  state,
  (fragment, kept, layout) => showLink(fragment, kept, layout),
  (canUndo) => (findById("undo").disabled = !canUndo),
);
const pageLayout = createPageLayout(state, pageHistory.amend, () => lessonPanel.bringBack());
const callbacks = { onChange: pageHistory.record, onRequest: showRequest, onCall, announce };
const weightsPanel = createWeightsPanel(state, {
  ...callbacks,
  onHead: (head) => {
    const labels = labelsOfSequence(head, state);
    if (labels !== state.labels) findById("labels").value = formatLabels(labels);
    Object.assign(state, { head, labels });
    redraw();
  },
  onRow: (row) => details.follow(row),
});
const details = createDetailSections(state, pageLayout, {
  ...callbacks,
  onRow: weightsPanel.selectRow,
});
const comparisons = createComparisons(state, {
  ...callbacks,
  onPoint: weightsPanel.showReadout,
});
const lessonPanel = createLessonPanel(state, {
  onStop: (fragment) => showLink(fragment, null, state),
  onClose: pageHistory.record,
  onMeasure: comparisons.measure,
});
const showExample = createExampleSelect({
  onExample: (example) => useExample(example),
  onOwn: (onCancel) => tensorList.openPaste(onCancel),
});
const runDebounced = debounce(() => run(), 120);
const runSoon = () => {
  expectRun();
  runDebounced();
  pageHistory.record();
};
const showVariant = createVariantForm(
  state,
  () => runSoon(),
  createRepeat(() => run()),
);
const tensorList = createTensorList(state, {
  onAdd: (tensors, { isAdded, request, labels }) => {
    if (request) checkpoint.close();
    const kept = { tensors, layer: keptLayer(state), example: null };
    Object.assign(state, isAdded ? {} : NEW_TENSORS, NO_REQUEST, kept);
    if (!isAdded && !state.layer) state.parameters = {};
    if (labels.length) state.labels = labels;
    const note = request && applyRequest(state, request, buildRequest);
    showOwn(note, note ? "note" : "hint");
    if (note) announce(note);
    applyState();
  },
  onChange: () => {
    leaveExample();
    applyState();
  },
  onEdit: () => {
    leaveExample();
    runSoon();
  },
  takeFiles: async (files) => checkpoint.take(await captured.take(files)),
});
const checkpoint = createCheckpointPanel(state, {
  onChange: expectRun,
  onLayer: (isNew) => {
    if (isNew) Object.assign(state, NEW_TENSORS, { dtype: null, pool: null, example: null });
    if (!("query" in state.variant.inputs)) state.variant = state.variants.get("softmax");
    showOwn("A layer of a checkpoint. Upload hidden states as x, or use random ones.");
    applyState();
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
  showOwn("A loaded layer. Upload hidden states as x, or use random ones.");
  applyState();
});
const captured = createCapturedPanel(state, {
  onHead: ({ tensors, note, isFirst, ...head }) => {
    checkpoint.close();
    const added = Object.entries(tensors).map(([name, tensor]) => ({ name, role: name, tensor }));
    Object.assign(state, NEW_TENSORS, NO_REQUEST, { ...head, tensors: added, example: null });
    state.variant = state.variants.get("softmax");
    showOwn(note);
    applyState();
    if (!isFirst) findById("weights").focus();
  },
  announce,
});

/** Shows that the tensors are the user's, with a note. */
function showOwn(note, className = "hint") {
  findById("labels").value = formatLabels(state.labels);
  showExample(state.example, note, className);
}

/** Makes the tensors of an example the user's, who has changed one. */
function leaveExample() {
  const example = EXAMPLES.find(({ id }) => id === state.example);
  state.example = null;
  if (example) showOwn(`Changed by you, from the example “${example.title}”.`);
}

/** Updates the controls to the state, then runs. */
function applyState() {
  runSoon();
  showVariant();
  tensorList.show();
  loadedLayers.show(state.layer);
}

/** Shows another state. */
function showState(fields, note, className) {
  checkpoint.close();
  Object.assign(state, fields);
  pageLayout.show();
  showOwn(note, className);
  applyState();
}

/** Shows the state of a fragment, in the layout that the page has; a lesson opens its own sections. */
function showLink(fragment, kept, layout) {
  const { fields, note, className } = openLink(fragment, kept, state.variants);
  const stays = fields.lesson && layout ? { isPresenting: layout.isPresenting } : layout;
  showState({ ...fields, ...stays }, note, className);
  lessonPanel.show(state.lesson);
}

/** Shows an example, for the variant of the page if that can run with it. */
function useExample(example) {
  const fields = stateOfExample(example, state.variants, state.variant);
  showState(fields, describeExample(example, fields.variant, state.variant));
}

/** Selects a variant; replaces an example that lacks the variant's inputs by one that has them. */
function chooseVariant(name) {
  state.variant = state.variants.get(name);
  if (missingInputs(state).length && state.example) {
    const { fields, about } = newExample(state);
    return showState(fields, about);
  }
  applyState();
}

/** Forgets the current or waiting run, which is out of date. The page is busy until the next. */
function expectRun() {
  view = null; // its numbers must not get the labels of the next
  weightsPanel.clear();
  details.clear();
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
    if (missing.length) throw new Error(summary.missingMessage(state.variant.variant, missing));
    const request = buildRequest(state);
    const newView = await fetchView(request, signal, onCall);
    await nextTask(); // of 512 positions, to read the response takes as long as to draw it
    if (signal.aborted) return;
    clearProblems();
    main.classList.remove("stale");
    view = newView;
    state.head = Math.min(state.head, (view.weights?.stack ?? 1) - 1);
    if (state.selectedRow >= request.rows) state.selectedRow = null;
    showRequest("weights", { path: request.path, body: heatmapBody(request) });
    setText(findById("status"), summary.describeRun(view));
    draw();
    pageLayout.whenOpen("compare", () => comparisons.update(newView));
    lessonPanel.arrive();
    if (!newView.fetchStats) return;
    newView.stats = await newView.fetchStats();
    if (!signal.aborted) draw();
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    main.classList.add("stale");
    clearProblems();
    showProblem(error);
    setText(findById("status"), null);
    if (error.isUnreachable) whenReady(run);
  } finally {
    document.body.classList.remove("loading");
    if (running.signal === signal) main.removeAttribute("aria-busy");
  }
}

function draw() {
  if (!view) return;
  summary.showNotes(view, state);
  weightsPanel.draw(view);
  details.draw(view);
}

/** Draws the maps for another head or other labels. */
function redraw() {
  draw();
  comparisons.draw();
  pageHistory.record();
}

function listen() {
  findById("variant").addEventListener("change", (event) => chooseVariant(event.target.value));
  findById("labels").addEventListener("input", (event) => {
    state.labels = parseLabels(event.target.value);
    tensorList.show();
    redraw();
  });
  findById("undo").addEventListener("click", () => history.back());
  findById("request-form").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
}

function start() {
  listenToTheme(findById("theme"), () => {
    for (const one of [weightsPanel, details, comparisons, captured]) one.repaint(view);
  });
  listen();
  listenToTerms();
  listenToSectionLinks(pageLayout.open);
  listenToCopyLink(pageHistory.createLink);
  loadCatalogue();
}

/** Loads the catalogue of variants, then the state of the address: without one, an example. */
async function loadCatalogue() {
  try {
    const { variants } = await get("/v1/variants");
    for (const variant of variants) state.variants.set(variant.variant, variant);
    await loadedLayers.load();
  } catch (error) {
    document.body.classList.remove("loading");
    if (error.isUnreachable) whenReady(run);
    return showProblem(error);
  }
  findById("variant").replaceChildren(
    ...[...state.variants.keys()].map((name) => new Option(name)),
  );
  comparisons.start();
  pageHistory.start();
}

start();
