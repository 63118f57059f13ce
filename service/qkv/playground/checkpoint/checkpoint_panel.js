// The section of the form for a checkpoint: lists its layers and makes the chosen one the layer of
// the page's requests.

import { post } from "../api.js";
import { isFromFile, layerBytes, layerDtype } from "../data/request_body.js";
import { dtypeOf } from "../data/safetensors.js";
import { findById, formatCount, h, setText } from "../dom.js";
import { toSentence } from "../error_messages.js";
import { readHeaders, readTensors, tensorBytes } from "./checkpoint_files.js";
import { isOfModel, noLayersMessage, readConfigFile, tooLargeMessage } from "./file_kinds.js";
import { createHiddenStates } from "./hidden_states.js";
import { createLayerFields, describeHeads, OTHER_HEADS } from "./layer_fields.js";
import { buildLayer } from "./layer_request.js";
import { layerIndex, readConfig } from "./model_config.js";

const FIRST_ROWS = 16; // of the random hidden states
const ALL_ROLES = "query, key, value";

/**
 * Creates the section.
 *
 * @param {Object} state of the page; its layer and tensors are set
 * @param {Object} callbacks
 * @param {() => void} callbacks.onChange called before the tensors of a layer are read
 * @param {(isNew: boolean) => void} callbacks.onLayer called with a new layer in the state
 * @param {() => void} callbacks.onClose
 * @param {(text: string|null) => void} callbacks.onError called if no checkpoint is open
 * @param {(files: File[]) => Promise<File[]>} callbacks.takeOthers takes files that are no
 *   checkpoint, and returns the others
 * @param {(text: string) => void} callbacks.announce
 * @returns {{take, close}} `take`: takes the files of a checkpoint, returns the others
 */
export function createCheckpointPanel(state, callbacks) {
  const { onChange, onLayer, onClose, onError, takeOthers, announce } = callbacks;
  const root = findById("checkpoint-panel");
  const fields = createLayerFields((name) => change(name));
  const fileName = h("span", { class: "name" });
  const fileAbout = h("span", { class: "hint" });
  const closeButton = h(
    "button",
    { type: "button", class: "quiet", "aria-label": "Close the checkpoint", click: () => leave() },
    "×",
  );
  const configNote = h("p", { class: "hint", id: "config-about" });
  const configInput = h("input", {
    type: "file",
    id: "config",
    class: "unseen",
    accept: ".json",
    "aria-describedby": "config-about",
    change: async () => {
      await open([...configInput.files]);
      configInput.value = "";
    },
  });
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const sent = h("p", { class: "hint", "data-pointers": "/layer" });
  root.append(
    h("p", { class: "checkpoint-file" }, fileName, closeButton, fileAbout),
    error,
    ...fields.parts,
    h(
      "div",
      { class: "row" },
      h("label", { class: "button", for: "config" }, "config.json"),
      configInput,
    ),
    configNote,
    fields.rowsField,
    sent,
  );
  let table = null; // the tensors of the files
  let layers = [];
  let maxBodyBytes = 0;
  let config = null; // the JSON of config.json
  let configured = []; // names of the parameters that config.json has set
  let choosing = 0; // number of the last choice of a layer

  const found = () => layers[fields.layer.selectedIndex];
  const layout = () => found().layouts[fields.layout.selectedIndex];
  const tensorNames = (layer) =>
    Object.keys(layer.shapes).map((name) => (layer.prefix ? `${layer.prefix}.${name}` : name));
  const isOpen = () => !root.hidden;

  /** Opens files that the user chose as a checkpoint; throws a message for the user. */
  const open = async (files) => {
    setText(error, null);
    try {
      const jsonFiles = files.filter(
        ({ name }) => /\.json$/i.test(name) && !/\.index\.json$/.test(name),
      );
      const others = files.filter((file) => !jsonFiles.includes(file));
      const configs = await Promise.all(jsonFiles.map(readConfigFile));
      if (others.length) show(others, await readHeaders(others).then(listLayers));
      else if (!isOpen())
        throw new Error("config.json alone has no layers: choose the .safetensors file too");
      if (others.length) state.parameters = {};
      if (configs.length) [config] = configs;
      else if (others.length) config = null;
      applyConfig();
      await choose(others.length > 0);
    } catch (problem) {
      if (!isOpen()) throw problem;
      setText(error, toSentence(problem.detail ?? problem.message));
    }
  };

  /** Takes the files of a checkpoint among uploaded ones; returns the others. */
  const take = async (files) => {
    const kept = [];
    const taken = [];
    for (const file of files) {
      ((await isOfModel(file, isOpen())) ? taken : kept).push(file);
    }
    if (taken.length) await open(taken);
    return kept;
  };

  const listLayers = async (tensors) => {
    const shapes = Object.fromEntries([...tensors].map(([name, { shape }]) => [name, shape]));
    const { result } = await post("/v1/layers", { shapes });
    if (!result.layers.length) throw new Error(noLayersMessage([...tensors.keys()]));
    return { tensors, ...result };
  };

  const show = (files, { tensors, layers: listed, max_body_bytes: limit }) => {
    [table, layers, maxBodyBytes] = [tensors, listed, limit];
    const size = files.reduce((sum, file) => sum + file.size, 0);
    fileName.textContent = files.length > 1 ? `${files.length} files` : files[0].name;
    const count = layers.length === 1 ? "1 attention layer" : `${layers.length} attention layers`;
    fileAbout.textContent = `${formatCount(size, "B")}, ${tensors.size} tensors, ${count}`;
    fields.layer.replaceChildren(
      ...layers.map((one) => new Option(one.prefix || "the whole file")),
    );
    fields.rows.value = FIRST_ROWS;
    root.hidden = false;
    root.open = true;
    showLayer();
    announce(`${fileName.textContent}: ${fileAbout.textContent}`);
  };

  /** Shows what the chosen layer allows; keeps heads and positions that fit it. */
  const showLayer = () => {
    const { layouts, shapes } = found();
    const before = fields.layout.value;
    fields.layout.replaceChildren(...layouts.map((one) => new Option(one.layout)));
    if (layouts.some((one) => one.layout === before)) fields.layout.value = before;
    fields.layoutField.hidden = layouts.length < 2;
    const sizes = Object.entries(shapes).map(([name, shape]) => `${name} ${shape.join(" × ")}`);
    fields.rowsAbout.textContent = `Normally distributed hidden states. Upload your own: (length, ${layouts[0].width}).`;
    fields.layerAbout.textContent = `${layouts.length > 1 ? "" : `Layout ${layouts[0].layout}: `}${sizes.join(", ")}.`;
    showLayout();
  };

  const showLayout = () => {
    const { heads, rotary_order: order } = layout();
    const before = fields.heads.value;
    const values = heads.map((one) => `${one.heads}/${one.kv_heads}`);
    const options = heads.map((one, i) => [one.heads, new Option(describeHeads(one), values[i])]);
    options.sort(([a], [b]) => a - b);
    fields.heads.replaceChildren(
      ...options.map(([, option]) => option),
      new Option("Other numbers", OTHER_HEADS),
    );
    const isKept = before === OTHER_HEADS || values.includes(before);
    fields.heads.value = isKept ? before : (values[0] ?? OTHER_HEADS);
    fields.positions.value = order ? "rotary" : "none";
    fields.order.value = order ?? "half";
    if (!fields.base.value) fields.base.value = 10000;
    showNeeded();
  };

  const showNeeded = () => {
    fields.otherHeads.hidden = fields.heads.value !== OTHER_HEADS;
    fields.rotary.hidden = fields.positions.value !== "rotary";
    const read = config && readConfig(config, layerIndex(found().prefix));
    fields.headsAbout.textContent = read?.heads
      ? "As config.json has it."
      : "A file of weights does not have this number; the config.json beside it does.";
    const scaling = read?.rope.scaling;
    setText(
      fields.positionsAbout,
      scaling && fields.positions.value === "rotary" ? `Scaled as ${scaling.rope_type}.` : null,
    );
  };

  /** Sets the fields to what config.json says about the chosen layer. */
  const applyConfig = () => {
    configNote.textContent =
      "Optional: the model's configuration. It fills in heads, positions and parameters such as causal.";
    const others = Object.entries(state.parameters).filter(([name]) => !configured.includes(name));
    configured = [];
    if (!config) return showNeeded();
    const { heads, kvHeads, positions, rope, parameters, notes } = readConfig(
      config,
      layerIndex(found().prefix),
    );
    if (heads) {
      const value = `${heads}/${kvHeads ?? heads}`;
      const isListed = [...fields.heads.options].some((option) => option.value === value);
      fields.heads.value = isListed ? value : OTHER_HEADS;
      [fields.queryHeads.value, fields.keyHeads.value] = [heads, kvHeads ?? heads];
    }
    const { rotary_order: order } = layout();
    fields.positions.value = positions ?? (order ? "rotary" : "none");
    fields.order.value = rope.order ?? order ?? "half";
    fields.base.value = rope.base ?? 10000;
    fields.dims.value = rope.dims ?? "";
    state.parameters = { ...Object.fromEntries(others), ...parameters };
    configured = Object.keys(parameters);
    const named = Object.entries(parameters).map(
      ([name, value]) => `${name} ${JSON.stringify(value)}`,
    );
    const known = [heads && `${heads} heads`, positions && `positions ${positions}`, ...named];
    const applied = known.filter(Boolean).join(", ") || "nothing";
    configNote.textContent = [`Applied: ${applied}`, ...notes].map(toSentence).join(" ");
    showNeeded();
  };

  const change = (name) => {
    if (name === "layer") showLayer();
    if (name === "layout") showLayout();
    if (name === "layer" || name === "layout") applyConfig();
    if (name === "heads" && !fields.queryHeads.value) {
      const [{ heads, kv_heads: keyHeads }] = [...layout().heads, { heads: 1, kv_heads: 1 }];
      [fields.queryHeads.value, fields.keyHeads.value] = [heads, keyHeads];
    }
    showNeeded();
    choose(false, name === "rows");
  };

  /** Reads the tensors of the chosen layer and makes it the layer of the page. */
  const choose = async (isNew, drawsRows = false) => {
    onChange();
    const own = (choosing += 1);
    const names = tensorNames(found());
    const bytes = tensorBytes(table, names);
    const info = names.map((name) => {
      const { dtype, shape, file } = table.get(name);
      return [name, { dtype: dtypeOf(dtype), shape, file: file.name, data: new Uint8Array() }];
    });
    let layer = { tensors: Object.fromEntries(info) };
    let problem = null;
    try {
      const read = config && readConfig(config, layerIndex(found().prefix));
      layer = { ...layer, ...buildLayer(found(), layout(), fields, read) };
      if (bytes > maxBodyBytes) throw new Error(tooLargeMessage(bytes, maxBodyBytes));
      layer.tensors = await readTensors(table, names);
    } catch (caught) {
      problem = Object.assign(caught, { pointer: caught.pointer ?? "/layer/prefix" });
    }
    if (own !== choosing || !isOpen()) return; // the user chose another one meanwhile
    Object.assign(state, { layer, layerError: problem });
    if (!problem) setHiddenStates(drawsRows);
    sent.textContent = problem
      ? ""
      : `Each run sends the layer: ${formatCount(layerBytes(layer), "B")} in ${layerDtype(layer)}.`;
    onLayer(isNew);
  };

  const setHiddenStates = (isChosen) => {
    for (const entry of state.tensors) if (entry.role === ALL_ROLES) entry.role = "x";
    const isOwn = state.tensors.some(
      ({ isUploaded, role }) => isUploaded && /^(x|query)$/.test(role),
    );
    if (isOwn && !isChosen) return;
    const rows = Math.min(Math.max(Math.round(fields.rows.valueAsNumber) || FIRST_ROWS, 1), 4096);
    fields.rows.value = rows;
    state.tensors = [createHiddenStates(rows, layout().width, layerDtype(state.layer))];
  };

  const close = () => {
    root.hidden = true;
    state.layerError = null;
    if (isFromFile(state.layer)) state.layer = null;
    [table, layers, config] = [null, [], null];
  };
  const leave = () => {
    close();
    onClose();
    findById("checkpoint").focus();
  };
  findById("checkpoint").addEventListener("change", async ({ target }) => {
    onError(null);
    const files = [...target.files];
    try {
      await open(files).catch(async (problem) => {
        if ((await takeOthers(files)).length) throw problem;
      });
    } catch (problem) {
      onError(problem.message);
    }
    target.value = ""; // lets the user select the same file again
  });
  return { take, close };
}
