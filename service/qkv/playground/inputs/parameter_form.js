// Creates the controls for a variant's parameters from their JSON schema in the catalogue.

import { findById, h, setText } from "../dom.js";
import { withSymbols } from "../glossary.js";
import { createScaleSlider } from "./scale_slider.js";

/**
 * Creates a control for each parameter.
 *
 * @param {Object} properties JSON schemas by name
 * @param {Object} values the values that are set, by name; changed in place
 * @param {() => void} onChange called when a value changed
 * @param {{initial: number, isSoftmax: boolean, onDrag: () => void}} slider of `scale`: see
 *   `createScaleSlider`; `onDrag` is called for each value while the user drags it
 * @returns {DocumentFragment}
 */
export function createControls(properties, values, onChange, slider) {
  const fragment = document.createDocumentFragment();
  for (const [name, schema] of Object.entries(properties)) {
    const set = (value) => {
      if (value === undefined) delete values[name];
      else values[name] = value;
      onChange();
    };
    const control = createControl(name, schema, values[name], set);
    const input = name === "scale" && control.querySelector("input");
    const onDrag = (factor) => {
      values[name] = factor;
      slider.onDrag();
    };
    if (input) input.after(createScaleSlider(input, { ...slider, onDrag }));
    fragment.append(control);
  }
  return fragment;
}

/**
 * Returns the values of parameters that a schema has, without default values.
 *
 * @param {Object} properties JSON schemas by name
 * @param {Object} values by name
 */
export function pickParameters(properties, values) {
  const picked = Object.entries(values).filter(
    ([name, value]) =>
      name in properties && JSON.stringify(value) !== JSON.stringify(properties[name].default),
  );
  return Object.fromEntries(picked);
}

/** Returns a variant with its parameters, in the form of a comparison or a sweep. */
export function buildChoice({ variant, parameters: { properties } }, values) {
  const parameters = pickParameters(properties, values);
  return Object.keys(parameters).length ? { variant, parameters } : variant;
}

function createControl(name, schema, value, set) {
  const id = `parameter-${name}`;
  const about = h("p", { class: "hint", id: `${id}-about` }, ...describe(schema));
  const error = h("p", { class: "error", id: `${id}-error`, hidden: true });
  const common = { id, name, "aria-describedby": `${id}-about ${id}-error` };
  const kinds = valueSchemas(schema);
  const current = value === undefined ? schema.default : value;
  const label = h("label", { for: id }, name);
  const pointer = { class: "field", "data-pointers": `/parameters/${name}` };
  if (kinds.every((kind) => kind.type === "boolean")) {
    const input = h("input", {
      ...common,
      "aria-describedby": `${id}-about ${name}-note ${id}-error`,
      type: "checkbox",
      change: (event) => set(event.target.checked),
    });
    input.checked = Boolean(current);
    const note = h("p", { class: "note", id: `${name}-note`, role: "status", hidden: true });
    const parts = [h("div", { class: "check" }, input, label), about, note, error];
    return h("div", pointer, ...parts);
  }
  const input = kinds.some((kind) => kind.enum)
    ? createSelect(common, kinds, current, set)
    : createTextInput(common, schema, kinds, current, set, error);
  const bounds = kinds.map(describeBounds).filter(Boolean).join(", or ");
  if (bounds) about.append(` ${bounds[0].toUpperCase()}${bounds.slice(1)}.`);
  return h("div", pointer, label, input, about, error);
}

/**
 * Shows a note beside `causal` if the number of queries differs from the number of keys: the
 * default alignment is then seldom the one that the user wants.
 *
 * @param {{rows: number, cols: number}} sizes queries and keys
 * @param {Object} values of the parameters, by name
 */
export function showCausalNote({ rows, cols }, values) {
  const note = findById("causal-note");
  if (!note) return;
  const isTopLeft = rows !== cols && !values.query_offset && findById("parameter-query_offset");
  const queries = rows === 1 ? "1 query" : `${rows} queries`;
  const keys = cols === 1 ? "1 key" : `${cols} keys`;
  setText(
    note,
    isTopLeft
      ? `${queries}, ${keys}: causal aligns query 0 with key 0. ` +
          "To align the last query with the last key, set query_offset to “end”."
      : null,
  );
}

/** Returns the description of a parameter. A field is empty on the page if JSON has null. */
function describe({ description = "" }) {
  return withSymbols(description.replace(/\bnull: /g, "empty: "));
}

/** Returns the schemas of a value, without the one of null. */
function valueSchemas(schema) {
  return (schema.anyOf ?? [schema]).filter((kind) => kind.type !== "null");
}

function createSelect(common, kinds, current, set) {
  const values = kinds.flatMap((kind) => kind.enum ?? []);
  const select = h("select", {
    ...common,
    change: (event) => set(values[event.target.selectedIndex]),
  });
  select.append(...values.map((word) => h("option", {}, String(word))));
  select.selectedIndex = values.indexOf(current);
  return select;
}

/** Creates a text field: for numbers, words, and all else as JSON. */
function createTextInput(common, schema, kinds, current, set, error) {
  const [kind] = kinds;
  const isNumber = kinds.every(({ type }) => type === "number" || type === "integer");
  const isWhole = kinds.every(({ type }) => type === "integer");
  const input = h("input", {
    ...common,
    autocomplete: "off",
    spellcheck: "false",
    type: isWhole ? "number" : "text", // of others, a browser may not take 0,5
    inputmode: isNumber && !isWhole && "decimal",
    step: isWhole && 1,
    min: isWhole && (kind.minimum ?? kind.exclusiveMinimum),
    max: isWhole && (kind.maximum ?? kind.exclusiveMaximum),
    placeholder:
      schema.default === null || schema.default === undefined ? "default" : toText(schema.default),
    input: () => {
      const text = isNumber ? input.value.replace(",", ".") : input.value;
      const { value, problem } = parseValue(text, kinds, input.validity.badInput);
      setText(error, problem);
      input.toggleAttribute("aria-invalid", Boolean(problem));
      if (!problem) set(value);
    },
  });
  if (JSON.stringify(current) !== JSON.stringify(schema.default)) input.value = toText(current);
  return input;
}

const toText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** Parses the text of a field: empty is the default, known words are strings, all else is JSON. */
function parseValue(text, kinds, isBadInput) {
  if (isBadInput) return { problem: "Expected a number." };
  const trimmed = text.trim();
  if (!trimmed) return { value: undefined };
  if (kinds.some((kind) => kind.const === trimmed || (kind.type === "string" && !kind.const))) {
    return { value: trimmed };
  }
  try {
    return { value: JSON.parse(trimmed) };
  } catch {
    return { problem: `Expected ${kinds.map(describeKind).join(" or ")}.` };
  }
}

function describeKind(kind) {
  if (kind.const !== undefined) return `“${kind.const}”`;
  return (
    { integer: "a whole number", number: "a number", array: "a list such as [4, 0]" }[kind.type] ??
    kind.type
  );
}

/** Describes the bounds of a number; bounds of a million and more are left out. */
function describeBounds(kind) {
  if (kind.const !== undefined) return `“${kind.const}”`;
  if (kind.type === "array") return "such as [4, 0]";
  if (kind.type !== "number" && kind.type !== "integer") return "";
  const [minimum, maximum] = [
    kind.minimum ?? kind.exclusiveMinimum,
    kind.maximum ?? kind.exclusiveMaximum,
  ];
  const hasLow = minimum !== undefined && Math.abs(minimum) < 1e6;
  const hasHigh = maximum !== undefined && Math.abs(maximum) < 1e6;
  const below = kind.exclusiveMaximum === undefined ? "at most" : "below";
  const above = kind.exclusiveMinimum === undefined ? "at least" : "above";
  const kindText = kind.type === "integer" ? "a whole number" : "";
  return [kindText, hasLow && `${above} ${minimum}`, hasHigh && `${below} ${maximum}`]
    .filter(Boolean)
    .join(", ");
}
