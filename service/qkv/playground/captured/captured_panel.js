// The section of a captured model: compares variants on its calls, and draws the figures of its heads.

import { findById, formatCount, h, setText } from "../dom.js";
import { toSentence } from "../error_messages.js";
import { labelsOfHead } from "../inputs/labels.js";
import { createSaveMenu } from "../keep/save_menu.js";
import {
  ANCHOR,
  compareCall,
  comparedVariants,
  DEFAULT_VARIANTS,
  problemOf,
} from "./call_request.js";
import { readCalls, readHeads } from "./captured_file.js";
import { HeadFigures, listRows } from "./head_figures.js";
import { createFigureField, createHeadMaps } from "./head_maps.js";
import { createHeadList, createMapTables } from "./head_tables.js";

const OF_ONE_CALL = [413, 422]; // errors after which the other calls are still compared

/**
 * Creates the section.
 *
 * @param {Object} state of the page
 * @param {Object} callbacks
 * @param {(head: Object) => void} callbacks.onHead called with a head to load: {tensors, parameters,
 *   note, labels, place, isFirst}; `isFirst`: the user did not choose it; `place`: {file, layer, head, items, tokens, lengths}, where `tokens` has a list
 *   for each sequence, and `lengths` are those of queries and keys
 * @param {(text: string) => void} callbacks.announce
 * @returns {{take, repaint}} `take`: takes a captured file among files, returns the others
 */
export function createCapturedPanel(state, { onHead, announce }) {
  const root = findById("captured");
  const about = findById("captured-about");
  const boxes = h("div", { class: "boxes", role: "group", "aria-label": "Variants of the heads" });
  const button = h("button", { type: "button", class: "primary", click: () => toggle() });
  const close = { type: "button", class: "quiet", "aria-label": "Close the captured model" };
  const progress = h("progress", { "aria-label": "Progress of the calls", hidden: true });
  const status = h("p", { class: "hint", role: "status" });
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const notes = h("ul", { class: "notes" });
  const maps = createHeadMaps({ onHead: (...head) => load(...head), announce });
  const list = createHeadList((...head) => load(...head));
  const tables = h("div", {
    class: "scroll",
    tabindex: "0",
    role: "region",
    "aria-label": "Tables of the maps",
  });
  const details = h(
    "details",
    { toggle: () => fillTables() },
    h("summary", {}, "Maps as tables"),
    tables,
  );
  const figureField = createFigureField((figure) => {
    maps.show(figure);
    list.sortBy(figure.name);
    fillTables();
  });
  const saveMenu = createSaveMenu("the list of heads", () => ({
    title: `${file.name.replace(/\.safetensors$/, "")}: heads beside ${ANCHOR}`,
    table: listRows(figures.rows()),
  }));
  const results = h(
    "div",
    { hidden: true },
    h("div", { class: "row head-figure" }, figureField, maps.scale),
    maps.area,
    notes,
    details,
    h("div", { class: "row head-list" }, h("h3", {}, "Closest heads"), saveMenu),
    ...list.parts,
  );
  root.querySelector("header").append(h("button", { ...close, click: () => leave() }, "×"));
  root.append(h("div", { class: "row" }, boxes, button), progress, status, error, results);
  let calls = [];
  let file = null;
  let figures = null;
  let running = null;
  let loading = 0; // number of the last head that the user chose
  const excluded = new Set();

  const take = async (files) => {
    const others = [];
    for (const one of files) {
      const found = await readCalls(one);
      if (found) open(one, found);
      else others.push(one);
    }
    return others;
  };
  const open = (opened, found) => {
    stop();
    [file, calls, figures] = [opened, found, null];
    about.textContent = describeCalls(file, calls);
    results.hidden = true;
    setText(error, null);
    notes.replaceChildren();
    showBoxes();
    showRunning(false);
    status.textContent = "Each head is compared with softmax, which the model used.";
    for (const element of [root, findById("captured-link")]) element.hidden = false;
    root.scrollIntoView();
    announce(`Captured model, ${about.textContent}`);
    if (state.example) load(calls[0].layer, calls[0].heads[0], true);
  };
  const leave = () => {
    stop();
    [file, calls, figures] = [null, [], null];
    for (const element of [root, findById("captured-link")]) element.hidden = true;
    findById("upload").focus();
  };
  const stop = () => {
    running?.abort();
    running = null;
  };

  const showBoxes = () => {
    const every = comparedVariants(state.variants);
    if (!boxes.childElementCount) {
      for (const { variant } of every)
        if (!DEFAULT_VARIANTS.includes(variant)) excluded.add(variant);
    }
    boxes.replaceChildren(
      ...every.map(({ variant }) => {
        const input = h("input", {
          type: "checkbox",
          id: `heads-${variant}`,
          change: () => {
            excluded[input.checked ? "delete" : "add"](variant);
            button.disabled = !chosen().length;
          },
        });
        input.checked = !excluded.has(variant);
        return h("div", { class: "check" }, input, h("label", { for: input.id }, variant));
      }),
    );
    button.disabled = !chosen().length;
  };
  const chosen = () =>
    comparedVariants(state.variants).filter(({ variant }) => !excluded.has(variant));

  const showRunning = (isRunning) => {
    button.textContent = isRunning ? "Stop" : "Compare heads";
    progress.hidden = !isRunning;
    results.setAttribute("aria-busy", String(isRunning));
  };
  const toggle = () => {
    if (!running) return run();
    running.abort();
  };

  const run = async () => {
    const controller = new AbortController();
    running = controller;
    const variants = chosen();
    const compared = new HeadFigures(
      calls,
      ANCHOR,
      variants.map(({ variant }) => variant),
    );
    setText(error, null);
    notes.replaceChildren();
    showRunning(true);
    let done = 0;
    try {
      for (const call of calls) {
        status.textContent = `Call ${done + 1} of ${calls.length}: ${call.layer}`;
        [progress.max, progress.value] = [calls.length, done];
        await compareOne(compared, call, variants, controller.signal);
        if (running !== controller) return; // another file is open
        controller.signal.throwIfAborted();
        done += 1;
        figures = compared;
        show(done === 1);
      }
      status.textContent = `Compared with ${ANCHOR} on ${describeCount(done, "call")}.`;
      announce(status.textContent);
    } catch (problem) {
      if (running !== controller) return;
      status.textContent = `Stopped after ${done} of ${describeCount(calls.length, "call")}.`;
      if (problem.name !== "AbortError")
        setText(error, toSentence(problem.detail ?? problem.message));
    }
    running = null;
    showRunning(false);
  };

  /** Compares the variants on a call that can see what it sees. */
  const compareOne = async (compared, call, variants, signal) => {
    const problems = variants.map((variant) => [variant, problemOf(variant, call)]);
    const usable = problems.filter(([, problem]) => !problem).map(([variant]) => variant);
    for (const [{ variant }, problem] of problems)
      if (problem) compared.fail(call, variant, problem);
    if (!usable.length) return;
    try {
      for (const part of await compareCall(call, usable, signal)) compared.add(call.layer, part);
    } catch (problem) {
      if (!OF_ONE_CALL.includes(problem.status)) throw problem;
      for (const { variant } of usable) compared.fail(call, variant, problem.detail);
    }
  };

  const show = (isFirst) => {
    results.hidden = false;
    if (isFirst) maps.start(figures);
    else maps.show();
    list.show(figures);
    notes.replaceChildren(...describeProblems(figures.rows()).map((note) => h("li", {}, note)));
    fillTables();
  };
  const fillTables = () => {
    if (details.open && figures) tables.replaceChildren(...createMapTables(figures, maps.figure()));
  };

  /** Loads a head of the first call of a layer that has it; `isFirst`: in place of an example. */
  const load = async (layer, head, isFirst = false) => {
    loading += 1;
    const number = loading;
    const having = calls.filter((call) => call.layer === layer && call.heads.includes(head));
    if (!having.length) return;
    const [call] = having;
    const at = call.heads.indexOf(head);
    try {
      const tensors = await readHeads(call, at, at + 1);
      if (number !== loading) return;
      const which = having.length > 1 ? `, the first of ${having.length} calls` : "";
      const note = `${layer || "model"}, head ${head}${which}, from ${file.name}.`;
      const lengths = [tensors.query, tensors.key].map(({ shape }) => shape.at(-2));
      const tokens = call.tokens.map((list) => (lengths.includes(list.length) ? list : []));
      const place = { file, layer, head, items: call.items, tokens, lengths };
      const labels = labelsOfHead(place, state);
      onHead({ tensors, parameters: { ...call.parameters }, note, labels, place, isFirst });
      if (!isFirst) announce(`Loaded ${note}`);
    } catch (problem) {
      setText(error, toSentence(problem.message));
    }
  };
  return { take, repaint: maps.repaint };
}

function describeCalls(file, calls) {
  const layers = new Set(calls.map(({ layer }) => layer)).size;
  const heads = new Set(calls.map(({ heads: numbers }) => numbers.length));
  const [least, most] = [Math.min(...heads), Math.max(...heads)];
  const ofHeads = least === most ? describeCount(most, "head") : `${least} to ${most} heads`;
  const counts = `${describeCount(layers, "layer")} of ${ofHeads}, ${describeCount(calls.length, "call")}`;
  return `${file.name}, ${formatCount(file.size, "B")}: ${counts}.`;
}

const describeCount = (count, noun) =>
  `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Returns a sentence for each reason, with the number of the heads without figures. */
function describeProblems(rows) {
  const counts = new Map();
  for (const { variant, problem } of rows) {
    if (problem === null) continue;
    const text = JSON.stringify([variant, problem]);
    counts.set(text, (counts.get(text) ?? 0) + 1);
  }
  return [...counts].map(([text, count]) => {
    const [variant, problem] = JSON.parse(text);
    const reason = problem.startsWith(variant) ? problem : `${variant}: ${problem}`;
    return `${reason.replace(/\.$/, "")} (no figures in ${describeCount(count, "head")}).`;
  });
}
