// The tensors of the request: what each is for, and how more come in.

import { find, h, say } from "./dom.js";
import { parseFile, parseText, toWire } from "./tensors.js";

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
export function inputsOf(tensors, variant, layer) {
  const inputs = {};
  for (const { role, tensor } of tensors) {
    for (const name of role.split(", ")) {
      if (isTaken(name, variant, layer)) inputs[name] = tensor;
    }
  }
  return inputs;
}

/** Tensors as JSON has them; each is written once, however often it is sent. */
export function wired(inputs) {
  return Object.fromEntries(Object.entries(inputs).map(([name, tensor]) => [name, wire(tensor)]));
}

const written = new WeakMap();

function wire(tensor) {
  if (!written.has(tensor)) written.set(tensor, toWire(tensor));
  return written.get(tensor);
}

/** Whether a variant takes an input of this name. */
export function isTaken(name, variant, layer) {
  return name in variant.inputs || (name === "x" && layer !== null && "query" in variant.inputs);
}

/** The .npy files of inputs, by name, where they came in such. */
export function filesOf(tensors) {
  const every = tensors.flatMap(({ role, file }) => role.split(", ").map((name) => [name, file]));
  return Object.fromEntries(every.filter(([, file]) => file));
}

/** The inputs that a variant needs and that are not there. */
export function lacking({ tensors, variant, layer }) {
  if (layer) return []; // which of them it makes, the service knows
  const there = inputsOf(tensors, variant, layer);
  return Object.entries(variant.inputs)
    .filter(([name, { optional }]) => !optional && !(name in there))
    .map(([name]) => name);
}

/**
 * The list of tensors and the ways to bring others.
 *
 * @param {Object} state its tensors, layer and variants
 * @param {(tensors: Array, isMore: boolean) => void} brought called with all that there are now;
 *   `isMore` where they stand beside some that were brought before
 * @param {() => void} changed called when one is for something else, or gone
 */
export function inputList(state, brought, changed) {
  const list = find("tensors");
  const fault = (text) => say(find("inputs-error"), text);
  const bring = (parts, files = []) => {
    const tensors = together(parts, state);
    for (const entry of tensors) {
      const file = `${entry.name}.npy`;
      if (files.includes(file)) entry.file = file;
    }
    brought(
      tensors,
      tensors.some((entry) => state.tensors.includes(entry)),
    );
  };

  const take = async (files) => {
    fault(null);
    try {
      bring(
        await Promise.all([...files].map((file) => parseFile(file))),
        [...files].map(({ name }) => name).filter((name) => name.endsWith(".npy")),
      );
    } catch (error) {
      fault(error.message);
    }
  };
  find("upload").addEventListener("change", async (event) => {
    await take(event.target.files);
    event.target.value = ""; // so that the same file may come again
  });
  const form = find("ask");
  form.addEventListener("dragover", (event) => {
    event.preventDefault();
    form.classList.add("over");
  });
  for (const name of ["dragleave", "drop"]) {
    form.addEventListener(name, () => form.classList.remove("over"));
  }
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) take(event.dataTransfer.files);
  });
  pasting((tensors) => bring([tensors]));

  return () => {
    fault(null);
    list.replaceChildren(
      ...state.tensors.map((entry) => row(entry, state, changed)),
      ...(state.layer ? [layerRow(state.layer)] : []),
      ...lacking(state).map(neededRow),
    );
  };
}

function pasting(use) {
  const [open, panel, text, error] = ["paste-open", "paste", "paste-text", "paste-error"].map(find);
  open.addEventListener("click", () => {
    panel.hidden = !panel.hidden;
    open.setAttribute("aria-expanded", String(!panel.hidden));
    if (!panel.hidden) text.focus();
  });
  find("paste-use").addEventListener("click", () => {
    try {
      const tensors = parseText(text.value);
      say(error, null);
      use(tensors);
    } catch (fault) {
      say(error, fault.message);
      text.focus();
    }
  });
}

/**
 * The tensors that were brought before and those that come now: a file that holds one, as .npy
 * does, adds to those; a file that holds several is all that there is.
 *
 * @param {Object[]} parts the tensors of each file, by name
 * @param {Object} state of the page
 */
function together(parts, state) {
  const parsed = Object.assign({}, ...parts);
  const isAll = parts.some((part) => Object.keys(part).length > 1);
  const old = isAll ? [] : state.tensors.filter((e) => e.isBrought && !(e.name in parsed));
  const fresh = (entries) => entries.map((entry) => ({ ...entry, isBrought: true }));
  if (!old.length) return fresh(named(parsed, state));
  for (const entry of old) {
    // alone it stood for all three, whatever its name
    if (entry.role === ALL && !entry.isChosen) entry.role = like(entry.name) ?? ALL;
  }
  const missing = lacking({ ...state, tensors: old });
  const names = Object.keys(parsed);
  const known = rolesOf(state);
  const entries = names.map((name) => {
    const role = known.includes(name) ? name : (like(name) ?? missing.shift());
    return { name, role: role ?? UNUSED, tensor: parsed[name] };
  });
  // nothing lacks it, and nothing says what for: it begins anew
  if (entries.every(({ role }) => role === UNUSED)) return fresh(named(parsed, state));
  const roles = entries.map(({ role }) => role);
  return [...old.filter(({ role }) => role === UNUSED || !roles.includes(role)), ...fresh(entries)];
}

/** What a tensor of this name is likely for, among others. */
function like(name) {
  return ["query", "key", "value"].find((role) => name.toLowerCase().startsWith(role[0]));
}

/** Tensors with what each is most likely for. */
function named(tensors, state) {
  const known = rolesOf(state);
  const entries = Object.entries(tensors);
  return entries.map(([name, tensor]) => {
    const alone = entries.length === 1 && state.variant.inputs.query;
    const isKnown = alone ? name in state.variant.inputs : known.includes(name);
    if (isKnown) return { name, role: name, tensor };
    const role = alone ? ALL : (entries.length > 1 && like(name)) || UNUSED;
    return { name, role, tensor };
  });
}

function rolesOf(state) {
  const names = [...state.variants.values()].flatMap((variant) => Object.keys(variant.inputs));
  return [ALL, ...new Set([...names, "x"])];
}

function row(entry, state, changed) {
  const { name, role, tensor } = entry;
  const isUsed = role.split(", ").some((one) => isTaken(one, state.variant, state.layer));
  const select = h("select", {
    "aria-label": `What ${name} is for`,
    change: (event) => {
      Object.assign(entry, { role: event.target.value, isChosen: true });
      changed();
    },
  });
  select.append(
    ...[...rolesOf(state), UNUSED].map((one) => h("option", { selected: one === role }, one)),
  );
  const remove = () => {
    state.tensors.splice(state.tensors.indexOf(entry), 1);
    changed();
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

function neededRow(name) {
  return h(
    "li",
    { class: "needed", "data-pointers": `/inputs/${name}` },
    h("span", { class: "name" }, name),
    h("span", { class: "hint" }, "still needed"),
  );
}

function layerRow(layer) {
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
