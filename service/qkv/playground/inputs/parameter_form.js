// Controls for a variant's parameters, made of the JSON schema in the catalogue.

import { h, setText } from "../dom.js";

/**
 * Controls for every parameter of a schema.
 *
 * @param {Object} properties JSON schemas by name
 * @param {Object} values what has been set, by name; changed in place
 * @param {() => void} onChange called when a value has become another
 * @returns {DocumentFragment}
 */
export function createControls(properties, values, onChange) {
  const fragment = document.createDocumentFragment();
  for (const [name, schema] of Object.entries(properties)) {
    const set = (value) => {
      if (value === undefined) delete values[name];
      else values[name] = value;
      onChange();
    };
    fragment.append(createControl(name, schema, values[name], set));
  }
  return fragment;
}

/**
 * What of the values a schema has, without those that are as by default.
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

/** A variant with what it takes of the values, as a comparison or a sweep names it. */
export function buildChoice({ variant, parameters: { properties } }, values) {
  const parameters = pickParameters(properties, values);
  return Object.keys(parameters).length ? { variant, parameters } : variant;
}

function createControl(name, schema, value, set) {
  const id = `parameter-${name}`;
  const about = h("p", { class: "hint", id: `${id}-about` }, schema.description ?? "");
  const error = h("p", { class: "error", id: `${id}-error`, hidden: true });
  const common = { id, name, "aria-describedby": `${id}-about ${id}-error` };
  const kinds = valueSchemas(schema);
  const current = value === undefined ? schema.default : value;
  const label = h("label", { for: id }, name);
  const pointer = { class: "field", "data-pointers": `/parameters/${name}` };
  if (kinds.every((kind) => kind.type === "boolean")) {
    const input = h("input", {
      ...common,
      type: "checkbox",
      change: (event) => set(event.target.checked),
    });
    input.checked = Boolean(current);
    return h("div", pointer, h("div", { class: "check" }, input, label), about, error);
  }
  const input = kinds.some((kind) => kind.enum)
    ? createSelect(common, kinds, current, set)
    : createTextInput(common, schema, kinds, current, set, error);
  const bounds = kinds.map(describeBounds).filter(Boolean).join(", or ");
  if (bounds) about.append(` ${bounds[0].toUpperCase()}${bounds.slice(1)}.`);
  return h("div", pointer, label, input, about, error);
}

/** The schemas that a value may have, but for null. */
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

/** A control that is written into: numbers, and whatever else as JSON. */
function createTextInput(common, schema, kinds, current, set, error) {
  const isNumber = kinds.every((kind) => kind.type === "number" || kind.type === "integer");
  const [kind] = kinds;
  const input = h("input", {
    ...common,
    autocomplete: "off",
    spellcheck: "false",
    type: isNumber ? "number" : "text",
    step: isNumber && (kind.type === "integer" ? 1 : "any"),
    min: isNumber && (kind.minimum ?? kind.exclusiveMinimum),
    max: isNumber && (kind.maximum ?? kind.exclusiveMaximum),
    placeholder:
      schema.default === null || schema.default === undefined
        ? "as by default"
        : toText(schema.default),
    input: () => {
      const { value, problem } = parseValue(input.value, kinds, input.validity.badInput);
      setText(error, problem);
      input.toggleAttribute("aria-invalid", Boolean(problem));
      if (!problem) set(value);
    },
  });
  if (JSON.stringify(current) !== JSON.stringify(schema.default)) input.value = toText(current);
  return input;
}

const toText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** What a text stands for: nothing for the default, words as they are, all else JSON. */
function parseValue(text, kinds, isBadInput) {
  if (isBadInput) return { problem: "This is not a number." };
  const trimmed = text.trim();
  if (!trimmed) return { value: undefined };
  if (kinds.some((kind) => kind.const === trimmed || (kind.type === "string" && !kind.const))) {
    return { value: trimmed };
  }
  try {
    return { value: JSON.parse(trimmed) };
  } catch {
    return { problem: `This is not ${kinds.map(describeKind).join(" or ")}.` };
  }
}

function describeKind(kind) {
  if (kind.const !== undefined) return `“${kind.const}”`;
  return (
    { integer: "a whole number", number: "a number", array: "a list such as [4, 0]" }[kind.type] ??
    kind.type
  );
}

/** The bounds of numbers, where they say more than that numbers have some size. */
function describeBounds(kind) {
  if (kind.const !== undefined) return `“${kind.const}”`;
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
