// The tensors of the request: what each is for, and how more come in.

import { parseFile, parseText, toWire } from "../data/tensors.js";
import { findById, h, setText } from "../dom.js";

const ALL = "query, key, value";
const UNUSED = "unused";

/**
 * The tensors that a variant is sent, by the names of its inputs.
 *
 * What other variants know and this one does not is left out, and shown so in the list.
 *
 * @param {Array<{name, role, tensor}>} tensors
 * @param {Object} variant of the catalogue
 * @param {Object|null} layer that projects x
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

/** Tensors as JSON has them; each is written once, however often it is sent. */
export function encodeInputs(inputs) {
  const entries = Object.entries(inputs).map(([name, tensor]) => [name, encodeTensor(tensor)]);
  return Object.fromEntries(entries);
}

const encodedTensors = new WeakMap();

function encodeTensor(tensor) {
  if (!encodedTensors.has(tensor)) encodedTensors.set(tensor, toWire(tensor));
  return encodedTensors.get(tensor);
}

/** Whether a variant takes an input of this name. */
export function acceptsInput(name, variant, layer) {
  return name in variant.inputs || (name === "x" && layer !== null && "query" in variant.inputs);
}

/** The .npy files of inputs, by name, where they came in such. */
export function inputFiles(tensors) {
  const every = tensors.flatMap(({ role, file }) => role.split(", ").map((name) => [name, file]));
  return Object.fromEntries(every.filter(([, file]) => file));
}

/** The inputs that a variant needs and that are not there. */
export function missingInputs({ tensors, variant, layer }) {
  if (layer) return []; // which of them it makes, the service knows
  const present = inputsFor(tensors, variant, layer);
  return Object.entries(variant.inputs)
    .filter(([name, { optional }]) => !optional && !(name in present))
    .map(([name]) => name);
}

/**
 * The list of tensors and the ways to bring others.
 *
 * @param {Object} state its tensors, layer and variants
 * @param {(tensors: Array, isAdded: boolean) => void} onAdd called with all that there are now;
 *   `isAdded` where they stand beside some that were brought before
 * @param {() => void} onChange called when one is for something else, or gone
 */
export function createTensorList(state, onAdd, onChange) {
  const list = findById("tensors");
  const showError = (text) => setText(findById("inputs-error"), text);
  const addTensors = (fileTensors, files = []) => {
    const tensors = mergeTensors(fileTensors, state);
    for (const entry of tensors) {
      const file = `${entry.name}.npy`;
      if (files.includes(file)) entry.file = file;
    }
    onAdd(
      tensors,
      tensors.some((entry) => state.tensors.includes(entry)),
    );
  };

  const addFiles = async (files) => {
    showError(null);
    try {
      addTensors(
        await Promise.all([...files].map((file) => parseFile(file))),
        [...files].map(({ name }) => name).filter((name) => name.endsWith(".npy")),
      );
    } catch (error) {
      showError(error.message);
    }
  };
  findById("upload").addEventListener("change", async (event) => {
    await addFiles(event.target.files);
    event.target.value = ""; // so that the same file may come again
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
  listenToPaste((tensors) => addTensors([tensors]));

  return () => {
    showError(null);
    list.replaceChildren(
      ...state.tensors.map((entry) => createRow(entry, state, onChange)),
      ...(state.layer ? [createLayerRow(state.layer)] : []),
      ...missingInputs(state).map(createMissingRow),
    );
  };
}

function listenToPaste(onPaste) {
  const ids = ["paste-open", "paste", "paste-text", "paste-error"];
  const [open, panel, text, error] = ids.map(findById);
  open.addEventListener("click", () => {
    panel.hidden = !panel.hidden;
    open.setAttribute("aria-expanded", String(!panel.hidden));
    if (!panel.hidden) text.focus();
  });
  findById("paste-use").addEventListener("click", () => {
    try {
      const tensors = parseText(text.value);
      setText(error, null);
      onPaste(tensors);
    } catch (problem) {
      setText(error, problem.message);
      text.focus();
    }
  });
}

/**
 * The tensors that were brought before and those that come now: a file that holds one, as .npy
 * does, adds to those; a file that holds several is all that there is.
 *
 * @param {Object[]} fileTensors the tensors of each file, by name
 * @param {Object} state of the page
 */
function mergeTensors(fileTensors, state) {
  const parsed = Object.assign({}, ...fileTensors);
  const replacesAll = fileTensors.some((tensors) => Object.keys(tensors).length > 1);
  const kept = replacesAll ? [] : state.tensors.filter((e) => e.isUploaded && !(e.name in parsed));
  const markUploaded = (entries) => entries.map((entry) => ({ ...entry, isUploaded: true }));
  if (!kept.length) return markUploaded(assignRoles(parsed, state));
  for (const entry of kept) {
    // alone it stood for all three, whatever its name
    if (entry.role === ALL && !entry.isChosen) entry.role = guessRole(entry.name) ?? ALL;
  }
  const missing = missingInputs({ ...state, tensors: kept });
  const names = Object.keys(parsed);
  const known = listRoles(state);
  const entries = names.map((name) => {
    const role = known.includes(name) ? name : (guessRole(name) ?? missing.shift());
    return { name, role: role ?? UNUSED, tensor: parsed[name] };
  });
  // nothing lacks it, and nothing says what for: it begins anew
  if (entries.every(({ role }) => role === UNUSED)) return markUploaded(assignRoles(parsed, state));
  const roles = entries.map(({ role }) => role);
  const others = kept.filter(({ role }) => role === UNUSED || !roles.includes(role));
  return [...others, ...markUploaded(entries)];
}

/** What a tensor of this name is likely for, among others. */
function guessRole(name) {
  return ["query", "key", "value"].find((role) => name.toLowerCase().startsWith(role[0]));
}

/** Tensors with what each is most likely for. */
function assignRoles(tensors, state) {
  const known = listRoles(state);
  const entries = Object.entries(tensors);
  return entries.map(([name, tensor]) => {
    const isAlone = entries.length === 1 && state.variant.inputs.query;
    const isKnown = isAlone ? name in state.variant.inputs : known.includes(name);
    if (isKnown) return { name, role: name, tensor };
    const role = isAlone ? ALL : (entries.length > 1 && guessRole(name)) || UNUSED;
    return { name, role, tensor };
  });
}

function listRoles(state) {
  const names = [...state.variants.values()].flatMap((variant) => Object.keys(variant.inputs));
  return [ALL, ...new Set([...names, "x"])];
}

function createRow(entry, state, onChange) {
  const { name, role, tensor } = entry;
  const isUsed = role.split(", ").some((one) => acceptsInput(one, state.variant, state.layer));
  const select = h("select", {
    "aria-label": `What ${name} is for`,
    change: (event) => {
      Object.assign(entry, { role: event.target.value, isChosen: true });
      onChange();
    },
  });
  select.append(
    ...[...listRoles(state), UNUSED].map((one) => h("option", { selected: one === role }, one)),
  );
  const remove = () => {
    state.tensors.splice(state.tensors.indexOf(entry), 1);
    onChange();
  };
  const shape = `${tensor.shape.join(" × ")} ${tensor.literal ? "" : tensor.dtype}`;
  const item = h(
    "li",
    { class: isUsed ? "" : "idle" },
    h("span", { class: "name" }, name),
    h("span", { class: "shape" }, shape),
    h(
      "button",
      { type: "button", class: "quiet", "aria-label": `Remove ${name}`, click: remove },
      "×",
    ),
    select,
  );
  if (!isUsed) {
    item.append(h("span", { class: "hint" }, `${state.variant.variant} takes no such input`));
  }
  if (isSwapped(role, tensor.shape)) {
    const [heads, length] = tensor.shape.slice(-3);
    const words = `${heads} heads of ${length} positions: the last three axes are heads, positions, channels. Are they swapped?`;
    item.append(h("span", { class: "hint swapped" }, words));
  }
  item.dataset.pointers = role
    .split(", ")
    .map((one) => `/inputs/${one}`)
    .join(" ");
  return item;
}

/** Whether heads and positions may be the wrong way round; one position has any number of heads. */
function isSwapped(role, shape) {
  const isSequence = role.split(", ").some((one) => ["query", "key", "value"].includes(one));
  return isSequence && shape.length > 2 && shape.at(-2) > 1 && shape.at(-3) > shape.at(-2);
}

function createMissingRow(name) {
  return h(
    "li",
    { class: "needed", "data-pointers": `/inputs/${name}` },
    h("span", { class: "name" }, name),
    h("span", { class: "hint" }, "still needed"),
  );
}

function createLayerRow(layer) {
  const shapes = Object.entries(layer.tensors).map(
    ([name, rows]) => `${name} ${rows.length} × ${rows[0].length}`,
  );
  return h(
    "li",
    { "data-pointers": "/layer" },
    h("span", { class: "name" }, "layer"),
    h("span", { class: "shape" }, layer.layout),
    h("span", { class: "hint" }, shapes.join(", ")),
  );
}
