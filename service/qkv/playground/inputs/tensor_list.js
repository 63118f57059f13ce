// The list of the request's tensors with the role of each; adds uploaded and pasted tensors.

import { castTo } from "../checkpoint/hidden_states.js";
import { isFromFile, isOfModel, layerDtype } from "../data/request_body.js";
import { toWire } from "../data/tensors.js";
import { readFile } from "../data/uploads.js";
import { findById, setText } from "../dom.js";
import { toSentence } from "../error_messages.js";
import { createPasteDialog } from "./paste_dialog.js";
import { requestTarget } from "./pasted_request.js";
import { createLayerRow, createMissingRow, createRow } from "./tensor_rows.js";

const ALL = "query, key, value";
const KEY_AND_VALUE = "key, value";
export const UNUSED = "unused";

/**
 * Returns the tensors to send to a variant, by the names of its inputs.
 *
 * Tensors for inputs of other variants are left out; the list marks them.
 *
 * @param {Array<{name, role, tensor}>} tensors
 * @param {Object} variant an entry of the catalogue
 * @param {Object|null} layer projects x
 */
export function inputsFor(tensors, variant, layer) {
  const inputs = {};
  for (const { role, tensor } of tensors) {
    for (const name of role.split(", ")) {
      if (acceptsInput(name, variant, layer)) inputs[name] = tensor;
    }
  }
  return inputs;
}

/**
 * Encodes tensors for a request: for JSON, or in the dtype of the layer if that is from a file. Each
 * tensor is encoded once, also if several requests send it.
 */
export function encodeInputs(inputs, layer = null) {
  const dtypes = { mask: null, key_lengths: "int64" };
  const encode = (name, tensor) => {
    if (!isFromFile(layer)) return encodeTensor(tensor);
    const dtype = name in dtypes ? dtypes[name] : layerDtype(layer);
    return castTo(tensor, dtype ?? tensor.dtype);
  };
  const entries = Object.entries(inputs).map(([name, tensor]) => [name, encode(name, tensor)]);
  return Object.fromEntries(entries);
}

const encodedTensors = new WeakMap();

function encodeTensor(tensor) {
  if (!encodedTensors.has(tensor)) encodedTensors.set(tensor, toWire(tensor));
  return encodedTensors.get(tensor);
}

/** True if a variant has an input of this name. */
export function acceptsInput(name, variant, layer) {
  return name in variant.inputs || (name === "x" && layer !== null && "query" in variant.inputs);
}

/** Returns the names of the .npy files of inputs, for inputs that were uploaded as such. */
export function inputFiles(tensors) {
  const every = tensors.flatMap(({ role, file }) => role.split(", ").map((name) => [name, file]));
  return Object.fromEntries(every.filter(([, file]) => file));
}

/** Returns the inputs that a variant requires and the page lacks. */
export function missingInputs({ tensors, variant, layer }) {
  if (isOfModel(layer) && "query" in variant.inputs) {
    return tensors.some(({ role }) => role === "x" || role.includes("query")) ? [] : ["x"];
  }
  if (layer) return []; // the service knows which inputs the layer projects
  const present = inputsFor(tensors, variant, layer);
  return Object.entries(variant.inputs)
    .filter(([name, { optional }]) => !optional && !(name in present))
    .map(([name]) => name);
}

/**
 * Creates the list and its upload and paste controls.
 *
 * @param {Object} state of the page
 * @param {(tensors: Array, options: {isAdded, request, labels}) => void} onAdd called with all
 *   tensors; `isAdded`: earlier ones are among them; `request`: the uploaded request, or null;
 *   `labels`: words of an uploaded table
 * @param {() => void} onChange called when a role changed or a tensor was removed
 * @param {(files: File[]) => Promise<File[]>} takeFiles takes the files of a checkpoint, and returns
 *   the others
 * @returns {{show: () => void, openPaste: (onCancel: () => void) => void}}
 */
export function createTensorList(state, onAdd, onChange, takeFiles) {
  const list = findById("tensors");
  const showError = (text) => setText(findById("inputs-error"), text && toSentence(text));
  const addUploads = (uploads, files = []) => {
    if (!state.variant) throw new Error("the list of variants is not loaded yet");
    const request = uploads.map((upload) => upload.request).find(Boolean) ?? null;
    const target = request
      ? { ...state, ...requestTarget(request, state), tensors: [] }
      : { ...state, layer: keptLayer(state) };
    const tensors = mergeTensors(
      uploads.map((upload) => upload.tensors),
      target,
    );
    for (const entry of tensors) {
      const file = `${entry.name}.npy`;
      if (files.includes(file)) entry.file = file;
    }
    const labels = uploads.map((upload) => upload.labels ?? []).find((one) => one.length) ?? [];
    const isAdded = tensors.some((entry) => state.tensors.includes(entry));
    onAdd(tensors, { isAdded, request, labels });
  };

  const addFilesNow = async (chosen) => {
    showError(null);
    try {
      const files = await takeFiles(chosen);
      if (!files.length) return;
      addUploads(
        await Promise.all(files.map((file) => readFile(file))),
        files.map(({ name }) => name).filter((name) => name.endsWith(".npy")),
      );
    } catch (error) {
      showError(error.message);
    }
  };
  // A small file that is chosen after a large one is read sooner, but is added after it.
  let earlier = Promise.resolve();
  const addFiles = (chosen) => {
    const files = [...chosen];
    earlier = earlier.then(() => addFilesNow(files));
  };
  findById("upload").addEventListener("change", (event) => {
    addFiles(event.target.files);
    event.target.value = ""; // lets the user select the same file again
  });
  const form = findById("request-form");
  form.addEventListener("dragover", (event) => {
    event.preventDefault();
    form.classList.add("over");
  });
  for (const name of ["dragleave", "drop"]) {
    form.addEventListener(name, () => form.classList.remove("over"));
  }
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) addFiles(event.dataTransfer.files);
  });
  const openPaste = createPasteDialog(
    (upload) => addUploads([upload]),
    () => findById("upload").click(),
  );
  findById("paste-open").addEventListener("click", () => openPaste());

  const show = () => {
    showError(null);
    const roles = [...listRoles(state), UNUSED];
    const isUsed = (role) => acceptsInput(role, state.variant, state.layer);
    const listed = { tensors: state.tensors, variant: state.variant, roles, isUsed };
    list.replaceChildren(
      ...state.tensors.map((entry) => createRow(entry, listed, onChange)),
      ...(state.layer && !isFromFile(state.layer) ? [createLayerRow(state.layer)] : []),
      ...missingInputs(state).map(createMissingRow),
    );
  };
  return { show, showError, openPaste };
}

/** Returns the layer of a model, to which uploaded tensors are added; null for other layers. */
export const keptLayer = ({ layer }) => (isOfModel(layer) ? layer : null);

/**
 * Merges new tensors with earlier uploads: a file with one tensor, such as .npy, adds to them, and
 * a file with several replaces them. An optional input, such as a mask, is added to an example too.
 *
 * @param {Object[]} fileTensors the tensors of each file, by name
 * @param {Object} state of the page
 */
function mergeTensors(fileTensors, state) {
  const parsed = Object.assign({}, ...fileTensors);
  const replacesAll = fileTensors.some((tensors) => Object.keys(tensors).length > 1);
  const { inputs } = state.variant;
  const isOptional = Object.keys(parsed).every((name) => inputs[name]?.optional); // such as mask
  const isKept = ({ name, isUploaded }) => (isUploaded || isOptional) && !(name in parsed);
  const kept = replacesAll ? [] : state.tensors.filter(isKept);
  for (const entry of kept) entry.isUploaded = true;
  const markUploaded = (entries) => entries.map((entry) => ({ ...entry, isUploaded: true }));
  if (!kept.length) return markUploaded(assignRoles(parsed, state));
  for (const entry of kept) {
    // a single tensor had all three roles, whatever its name
    if (entry.role === ALL && !entry.isChosen) entry.role = guessRole(entry.name) ?? ALL;
  }
  const missing = missingInputs({ ...state, tensors: kept });
  const names = Object.keys(parsed);
  const known = listRoles(state);
  const entries = names.map((name) => {
    const role = known.includes(name) ? name : (guessRole(name) ?? missing.shift());
    return { name, role: role ?? UNUSED, tensor: parsed[name] };
  });
  // no input is missing and no name tells a role: the new tensors replace the old ones
  if (entries.every(({ role }) => role === UNUSED)) return markUploaded(assignRoles(parsed, state));
  const roles = entries.map(({ role }) => role);
  const others = kept.filter(({ role }) => role === UNUSED || !roles.includes(role));
  return [...others, ...markUploaded(entries)];
}

/** Guesses the role of one of several tensors from its first letter. */
function guessRole(name) {
  return ["query", "key", "value"].find((role) => name.toLowerCase().startsWith(role[0]));
}

/** Assigns a role to each tensor. */
function assignRoles(tensors, state) {
  const known = listRoles(state);
  const entries = Object.entries(tensors);
  const isNamed = ([name]) => known.includes(name) || guessRole(name);
  const roles = { 2: ["query", KEY_AND_VALUE], 3: ["query", "key", "value"] }[entries.length];
  if (roles && state.variant.inputs.query && !state.layer && !entries.some(isNamed)) {
    return entries.map(([name, tensor], at) => ({ name, role: roles[at], tensor }));
  }
  return entries.map(([name, tensor]) => {
    const isAlone = entries.length === 1 && state.variant.inputs.query && !state.layer;
    if (entries.length === 1 && isOfModel(state.layer) && !known.includes(name)) {
      return { name, role: "x", tensor };
    }
    const isKnown = isAlone ? name in state.variant.inputs : known.includes(name);
    if (isKnown) return { name, role: name, tensor };
    const role = isAlone ? ALL : (entries.length > 1 && guessRole(name)) || UNUSED;
    return { name, role, tensor };
  });
}

/** Returns the roles that a tensor can have, for any variant of the catalogue. */
export function listRoles({ variants }) {
  const names = [...variants.values()].flatMap((variant) => Object.keys(variant.inputs));
  return [ALL, KEY_AND_VALUE, ...new Set([...names, "x"])];
}
