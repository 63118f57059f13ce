// Converts tensors between JSON and bytes: nested lists, or {"dtype", "shape", "data": base64}.
//
// dtypes.js describes a tensor {dtype, shape, data} and converts it to numbers. A tensor from lists
// also has `literal: true` and is sent as lists again: the service chooses the dtype of such numbers
// by the input that they are for.

import {
  byteLength,
  countElements,
  DTYPE_BYTES,
  fromNumbers,
  toNumbers,
  unknownDtypeMessage,
} from "./dtypes.js";

export { byteLength, countElements, fromNumbers, toNumbers } from "./dtypes.js";

/** Longer texts are rejected: numbers in lists take several times their length in memory. */
export const MAX_TEXT_LENGTH = 64 * 2 ** 20;

const MAX_RANK = 32;
const SPECIAL_NUMBERS = { NaN, Infinity: Infinity, "-Infinity": -Infinity }; // JSON has none of these

/**
 * Parses JSON.
 *
 * @param {string} text
 * @throws {Error} a message for the user
 */
export function parseJson(text) {
  if (text.length > MAX_TEXT_LENGTH) {
    throw new Error(`text too long: ${text.length} characters, the limit is ${MAX_TEXT_LENGTH}`);
  }
  if (!text.trim()) throw new Error("the text is empty");
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`this is not JSON: ${error.message}`);
  }
}

/**
 * Parses tensors from a JSON value: nested lists of numbers or booleans, one
 * {"dtype", "shape", "data"}, or an object with one of these for each name.
 *
 * @param {*} value
 * @param {string} name for a tensor without one
 * @returns {Object<string, {dtype: string, shape: number[], data: Uint8Array, literal?: true}>}
 * @throws {Error} a message for the user
 */
export function parseTensors(value, name = "tensor") {
  if (Array.isArray(value) || isTensor(value)) {
    return Object.fromEntries([[name, fromWire(value)]]);
  }
  if (!isObject(value) || !Object.keys(value).length) throw new Error(notATensorMessage(value));
  return Object.fromEntries(
    Object.entries(value).map(([key, tensor]) => {
      try {
        return [key, fromWire(tensor)];
      } catch (error) {
        throw new Error(`${key}: ${error.message}`);
      }
    }),
  );
}

/** Returns a tensor in the JSON form of the service: {"dtype", "shape", "data": base64}, or lists. */
export function toWire(tensor) {
  if (tensor.literal) return toLists(tensor);
  return { dtype: tensor.dtype, shape: tensor.shape, data: encodeBase64(tensor.data) };
}

/** Returns the numbers or booleans of a tensor as nested lists. */
export function toLists(tensor) {
  const numbers = toNumbers(tensor);
  let at = 0;
  const nextLeaf = () => {
    const number = numbers[at++];
    if (tensor.dtype === "bool") return number === 1;
    return Number.isFinite(number) ? number : String(number);
  };
  const nest = ([size, ...rest]) =>
    size === undefined ? nextLeaf() : Array.from({ length: size }, () => nest(rest));
  return nest(tensor.shape);
}

/**
 * Parses one tensor of a request or a response.
 *
 * @param {Array|Object} value nested lists, or {"dtype", "shape", "data": base64}
 * @throws {Error} a message for the user
 */
export function fromWire(value) {
  if (Array.isArray(value)) return fromLists(value);
  if (!isTensor(value)) {
    throw new Error(notATensorMessage(value));
  }
  if (!Object.hasOwn(DTYPE_BYTES, value.dtype)) throw new Error(unknownDtypeMessage(value.dtype));
  const { shape } = value;
  const isSizeList = Array.isArray(shape) && shape.every((n) => Number.isSafeInteger(n) && n >= 0);
  if (!isSizeList || shape.length > MAX_RANK) {
    throw new Error(
      `shape ${abbreviate(shape)} is invalid: expected a list of at most ${MAX_RANK} whole numbers`,
    );
  }
  const data = decodeBase64(value.data);
  if (data.length !== byteLength(value.dtype, shape)) {
    throw new Error(
      `${value.dtype} of shape [${shape}] takes ${byteLength(value.dtype, shape)} bytes, ` +
        `but data has ${data.length}`,
    );
  }
  return { dtype: value.dtype, shape: [...shape], data };
}

/** Encodes bytes as base64. */
export function encodeBase64(bytes) {
  const step = 3 * 2 ** 13; // a multiple of 3 avoids padding; spread as arguments
  let text = "";
  for (let at = 0; at < bytes.length; at += step) {
    text += btoa(String.fromCharCode(...bytes.subarray(at, at + step)));
  }
  return text;
}

/** Decodes base64. */
export function decodeBase64(text) {
  let characters;
  try {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text); // browsers since 2025: 10 times faster
    characters = atob(text);
  } catch {
    throw new Error("data is not base64");
  }
  const bytes = new Uint8Array(characters.length);
  for (let at = 0; at < bytes.length; at += 1) bytes[at] = characters.charCodeAt(at);
  return bytes;
}

function fromLists(lists) {
  const shape = [];
  for (let list = lists; Array.isArray(list); list = list[0]) {
    shape.push(list.length);
    if (shape.length > MAX_RANK)
      throw new Error(`lists are nested too deep: the limit is ${MAX_RANK} levels`);
  }
  const numbers = new Float64Array(countElements(shape));
  const output = { numbers, length: 0, kind: null };
  fillNumbers(lists, shape, [], output);
  const dtype = output.kind === "boolean" ? "bool" : "float64";
  return { ...fromNumbers(numbers, shape, dtype), literal: true };
}

/** Appends the numbers of nested lists to `output`; `path` holds the indices of this list. */
function fillNumbers(list, shape, path, output) {
  const depth = path.length;
  if (list.length !== shape[depth]) {
    throw new Error(
      `${formatPath(path)} has ${list.length} entries, but the first list has ${shape[depth]}`,
    );
  }
  for (let index = 0; index < list.length; index += 1) {
    const entry = list[index];
    path.push(index);
    if (Array.isArray(entry) !== depth + 1 < shape.length) {
      throw new Error(
        `${formatPath(path)} is ${abbreviate(entry)}: all lists of one level need the same depth`,
      );
    }
    if (Array.isArray(entry)) fillNumbers(entry, shape, path, output);
    else output.numbers[output.length++] = parseNumber(entry, path, output);
    path.pop();
  }
}

function parseNumber(entry, path, output) {
  const known =
    typeof entry === "string" && Object.hasOwn(SPECIAL_NUMBERS, entry)
      ? SPECIAL_NUMBERS[entry]
      : entry;
  const type = typeof known;
  if (type !== "number" && type !== "boolean") {
    throw new Error(
      `${formatPath(path)} is ${abbreviate(entry)}: expected a number, "NaN", "Infinity", ` +
        '"-Infinity", true or false',
    );
  }
  // JSON.parse returns Infinity for numbers such as 1e999
  if (Math.abs(entry) === Infinity && typeof entry === "number") {
    throw new Error(`${formatPath(path)} is too large for float64`);
  }
  output.kind ??= type;
  if (output.kind !== type) {
    throw new Error(
      `${formatPath(path)} is ${abbreviate(entry)}, but the entries before are ${output.kind}s`,
    );
  }
  return Number(known);
}

/** True for a JSON object: not for a list or null. */
export function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

function isTensor(value) {
  return isObject(value) && typeof value.data === "string" && "shape" in value && "dtype" in value;
}

function formatPath(path) {
  return path.length ? path.map((index) => `[${index}]`).join("") : "the list";
}

function notATensorMessage(value) {
  return `expected a tensor: nested lists or {"dtype", "shape", "data"}; got ${abbreviate(value)}`;
}

/** Shortens a value for a message. */
function abbreviate(value) {
  if (Array.isArray(value) && (value.length > 8 || value.some(Array.isArray))) {
    return `a list of ${value.length}`;
  }
  if (isObject(value)) return "an object";
  return String(JSON.stringify(value)).slice(0, 40);
}
