// Writes the state of the page into the fragment of its address, and reads it back.
//
// A fragment such as #example=words&variant=linear&parameters.causal=true&row=1 is for people too:
// a field that it lacks has the value of the example. A fragment such as #lesson=linear&stop=2 has the
// state of that stop. The browser sends no fragment to the service.

import { isFromFile, isLoaded } from "../data/request_body.js";
import { fromWire, isObject, parseJson, toWire } from "../data/tensors.js";
import { EXAMPLES } from "../inputs/examples.js";
import { formatLabels, parseLabels } from "../inputs/labels.js";
import { listRoles, UNUSED } from "../inputs/tensor_roles.js";
import { findStop, LESSONS } from "../lessons/lesson_list.js";

/** Longer values stay out of the fragment: mail and chat break long links. */
const MAX_LENGTH = 4000;

const PARAMETER = "parameters.";

/** True if a fragment holds a state, not the name of a section. */
export const isLink = (fragment) => fragment.includes("=");

/**
 * Writes the fragment of a state.
 *
 * @param {Object} state of the page
 * @returns {{fragment: string, leftOut: string[]}} `leftOut`: fields that are too large for it
 */
export function formatLink(state) {
  const { fragment, leftOut } = formatFields(state);
  if (!state.lesson) return { fragment, leftOut };
  const { id, stop, fragment: ofStop } = state.lesson;
  const place = `lesson=${id}&stop=${stop}`;
  return { fragment: fragment === ofStop ? place : `${place}&${fragment}`, leftOut };
}

/** Writes the fragment of a state without its lesson. */
export function formatFields(state) {
  const { example, variant, layer, selectedRow } = state;
  const fields = new URLSearchParams();
  const leftOut = [];
  const set = (name, value) => {
    if (value.length <= MAX_LENGTH) fields.set(name, value);
    else leftOut.push(name);
  };
  if (example) fields.set("example", example);
  fields.set("variant", variant.variant);
  for (const [name, value] of Object.entries(state.parameters)) {
    set(`${PARAMETER}${name}`, JSON.stringify(value));
  }
  if (!example) {
    set("tensors", formatTensors(state.tensors));
    if (isFromFile(layer)) leftOut.push("layer");
    else if (layer) set("layer", JSON.stringify(layer));
  }
  for (const name of ["dtype", "pool", "difference", "baseline"]) {
    if (state[name] !== null) fields.set(name, state[name]);
  }
  set("labels", formatLabels(state.labels));
  fields.set("row", selectedRow ?? "");
  if (state.head) fields.set("head", state.head);
  if (state.entry) fields.set("entry", `${state.entry.row},${state.entry.col}`);
  if (state.usesRoot) fields.set("shades", "root");
  if (state.showsAllMetrics) fields.set("metrics", "all");
  if (state.excluded.length) fields.set("without", state.excluded.join());
  if (state.isPresenting) fields.set("view", "presenter");
  if (state.open.length) fields.set("open", state.open.join());
  if (state.closed.length) fields.set("closed", state.closed.join());
  if (leftOut.length) fields.set("left_out", leftOut.join());
  return { fragment: fields.toString(), leftOut };
}

/** Returns short tensors as JSON; a long text, without a copy of the numbers, if they are large. */
function formatTensors(tensors) {
  const byteCount = tensors.reduce((sum, { tensor }) => sum + tensor.data.length, 0);
  if (byteCount > 8 * MAX_LENGTH) return " ".repeat(MAX_LENGTH + 1);
  const entries = tensors.map(({ name, role, tensor, isChosen, isRandom }) => {
    const flags = { isChosen: isChosen || undefined, isRandom: isRandom || undefined };
    return { name, role, tensor: toWire(tensor), ...flags };
  });
  return JSON.stringify(entries); // without what is undefined
}

/**
 * Reads a fragment.
 *
 * @param {string} fragment without #
 * @param {Map<string, Object>} variants the catalogue
 * @returns {{example: Object|null, fields: Object, leftOut: string[]}} `fields`: those of the state
 *   that the fragment names
 * @throws {Error} a message for the user
 */
export function parseLink(fragment, variants) {
  const given = withStop(new URLSearchParams(fragment));
  const fields = {};
  const read = (name, parse, field = name) => {
    if (given.has(name)) fields[field] = parse(given.get(name), name);
  };
  const parameters = [...given].filter(([name]) => name.startsWith(PARAMETER));
  if (parameters.length || given.has("variant")) {
    fields.parameters = Object.fromEntries(
      parameters.map(([name, text]) => [name.slice(PARAMETER.length), parseField(text, name)]),
    );
  }
  read("variant", (name) => findOne(name, variants, "variant"));
  read("tensors", (text) => parseTensorList(text, variants));
  read("layer", parseLayer);
  for (const name of ["dtype", "difference", "baseline"]) read(name, String);
  for (const name of ["pool", "head"]) read(name, parseCount);
  read("row", (text) => (text ? parseCount(text, "row") : null), "selectedRow");
  read("entry", parseEntry);
  read("labels", parseLabels);
  read("shades", (text) => text === "root", "usesRoot");
  read("metrics", (text) => text === "all", "showsAllMetrics");
  read("without", (text) => text.split(","), "excluded");
  read("view", (text) => text === "presenter", "isPresenting");
  for (const name of ["open", "closed"]) read(name, (text) => text.split(","));
  read("lesson", (id) => ({ id, stop: Number(given.get("stop")), fragment: null }));
  const examples = new Map(EXAMPLES.map((example) => [example.id, example]));
  const example = given.get("example");
  return {
    example: example === null ? null : findOne(example, examples, "example"),
    fields,
    leftOut: (given.get("left_out") ?? "").split(",").filter(Boolean),
  };
}

/** Adds the fields of the stop that a link names, unless the link has a state of its own. */
function withStop(given) {
  if (!given.has("lesson")) return given;
  const id = given.get("lesson");
  findOne(id, new Map(LESSONS.map((lesson) => [lesson.id, lesson])), "lesson");
  if (!given.has("stop")) given.set("stop", "1");
  const stop = findStop({ id, stop: parseCount(given.get("stop"), "stop") });
  if (!stop) throw wrongField("stop", given.get("stop"), "a stop of the lesson, counted from 1");
  if (given.has("variant")) return given;
  for (const [name, value] of new URLSearchParams({ ...stop.state, open: stop.section })) {
    if (!given.has(name)) given.set(name, value);
  }
  return given;
}

function findOne(name, known, field) {
  if (known.has(name)) return known.get(name);
  throw wrongField(field, name, [...known.keys()].join(", "));
}

function parseField(text, name) {
  try {
    return parseJson(text);
  } catch {
    throw wrongField(name, text, "JSON");
  }
}

function parseCount(text, name) {
  if (/^\d{1,9}$/.test(text)) return Number(text);
  throw wrongField(name, text, "a whole number");
}

function parseEntry(text, name) {
  if (!/^\d{1,9},\d{1,9}$/.test(text)) throw wrongField(name, text, "a row and a channel, as 0,1");
  const [row, col] = text.split(",").map(Number);
  return { row, col };
}

function parseLayer(text, name) {
  const layer = parseField(text, name);
  if (isObject(layer) && (isObject(layer.tensors) || isLoaded(layer))) return layer;
  throw wrongField(name, text, "an object with tensors, or with the name of a loaded layer");
}

function parseTensorList(text, variants) {
  const entries = parseField(text, "tensors");
  const isEntry = (one) => isObject(one) && typeof one.name === "string";
  if (!Array.isArray(entries) || !entries.every(isEntry)) {
    throw wrongField("tensors", text, "a list of tensors with names");
  }
  const roles = [...listRoles({ variants }), UNUSED];
  return entries.map(({ name, role, tensor, isChosen, isRandom }) => ({
    name,
    role: roles.includes(role) ? role : UNUSED,
    tensor: fromWire(tensor),
    isUploaded: isRandom !== true, // what the page drew is not the user's
    isChosen: isChosen === true,
    isRandom: isRandom === true,
  }));
}

function wrongField(name, text, expected) {
  return new Error(
    `${name} of this link is invalid: got “${text.slice(0, 40)}”, expected ${expected}`,
  );
}
