// Tensors as people bring them (.npy, .safetensors, JSON) and as the service takes them.
//
// A tensor is {dtype, shape, data}; dtypes.js says how, and makes numbers of one and back. One that
// came as numbers in lists has `literal: true` beside them, and travels as lists again: what its
// numbers become depends on what they are for, which the service knows.

import {
  byteLength,
  countElements,
  DTYPE_BYTES,
  fromNumbers,
  toNumbers,
  unknownDtypeMessage,
} from "./dtypes.js";
import { isNpy, parseNpy } from "./npy.js";
import { isSafetensors, parseSafetensors } from "./safetensors.js";

export { byteLength, countElements, fromNumbers, toNumbers } from "./dtypes.js";

/** A file larger than this is refused unread: no service with default settings would take it. */
export const MAX_FILE_BYTES = 256 * 2 ** 20;
/** A text larger than this is refused: numbers in lists take several times their length. */
export const MAX_TEXT_LENGTH = 64 * 2 ** 20;

const MAX_RANK = 32;
const SPECIAL_NUMBERS = { NaN, Infinity: Infinity, "-Infinity": -Infinity }; // strings for what JSON lacks

/**
 * The tensors of a file, by name: .npy (named after the file), .safetensors or JSON. What a file is
 * shows in its first bytes, whatever its name.
 *
 * @param {File} file
 * @param {{maxBytes?: number}} options
 * @returns {Promise<Object<string, {dtype: string, shape: number[], data: Uint8Array}>>}
 * @throws {Error} in words for whoever chose the file
 */
export async function parseFile(file, { maxBytes = MAX_FILE_BYTES } = {}) {
  try {
    if (file.size > maxBytes) {
      throw new Error(`this file has ${file.size} bytes; at most ${maxBytes} are read`);
    }
    return parseBytes(new Uint8Array(await file.arrayBuffer()), file.name);
  } catch (error) {
    throw new Error(`${file.name}: ${error.message}`);
  }
}

function parseBytes(bytes, fileName) {
  const [, stem, suffix] = /^(.+?)(\.[^.]*)?$/.exec(fileName);
  if (!bytes.length) throw new Error("this file is empty");
  if (isNpy(bytes)) return Object.fromEntries([[stem, parseNpy(bytes)]]);
  if (isSafetensors(bytes)) return parseSafetensors(bytes);
  if (suffix === ".npy" || suffix === ".safetensors") {
    throw new Error(`it does not begin as a ${suffix} does`);
  }
  if (bytes[0] === 0x50 && bytes[1] === 0x4b) {
    throw new Error("this is an archive (.npz, .pt or .zip); save arrays as .npy or .safetensors");
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error("this is no .npy, .safetensors or JSON");
  }
  return parseText(text, { name: stem });
}

/**
 * The tensors of JSON, by name. It may be nested lists of numbers or booleans, one
 * {"dtype", "shape", "data"}, an object of such by name, or a request with its "inputs".
 *
 * @param {string} text
 * @param {{name?: string}} options `name`: of a tensor that has none
 * @returns {Object<string, {dtype: string, shape: number[], data: Uint8Array, literal?: true}>}
 * @throws {Error} in words for whoever wrote the text
 */
export function parseText(text, { name = "tensor" } = {}) {
  if (text.length > MAX_TEXT_LENGTH) {
    throw new Error(`this text has ${text.length} characters; at most ${MAX_TEXT_LENGTH} are read`);
  }
  if (!text.trim()) throw new Error("there is nothing here");
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`this is not JSON: ${error.message}`);
  }
  if (Array.isArray(value) || isTensor(value)) {
    return Object.fromEntries([[name, fromWire(value)]]);
  }
  const tensors = isObject(value) && isObject(value.inputs) ? value.inputs : value;
  if (!isObject(tensors) || !Object.keys(tensors).length) {
    throw new Error(
      `a tensor is lists of numbers or {"dtype", "shape", "data"}; ${abbreviate(value)} came`,
    );
  }
  return Object.fromEntries(
    Object.entries(tensors).map(([key, tensor]) => {
      try {
        return [key, fromWire(tensor)];
      } catch (error) {
        throw new Error(`${key}: ${error.message}`);
      }
    }),
  );
}

/** A tensor as the service takes it in JSON: {"dtype", "shape", "data": base64}, or lists. */
export function toWire(tensor) {
  if (tensor.literal) return toLists(tensor);
  return { dtype: tensor.dtype, shape: tensor.shape, data: encodeBase64(tensor.data) };
}

/** The numbers, or booleans, of a tensor as nested lists. */
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
 * A tensor of what stands for one in JSON, in a request or an answer.
 *
 * @param {Array|Object} value nested lists, or {"dtype", "shape", "data": base64}
 * @throws {Error} it is none
 */
export function fromWire(value) {
  if (Array.isArray(value)) return fromLists(value);
  if (!isTensor(value)) {
    throw new Error(
      `a tensor is lists of numbers or {"dtype", "shape", "data"}; ${abbreviate(value)} came`,
    );
  }
  if (!Object.hasOwn(DTYPE_BYTES, value.dtype)) throw new Error(unknownDtypeMessage(value.dtype));
  const { shape } = value;
  const isSizeList = Array.isArray(shape) && shape.every((n) => Number.isSafeInteger(n) && n >= 0);
  if (!isSizeList || shape.length > MAX_RANK) {
    throw new Error(
      `shape ${abbreviate(shape)} is not a list of at most ${MAX_RANK} whole numbers`,
    );
  }
  const data = decodeBase64(value.data);
  if (data.length !== byteLength(value.dtype, shape)) {
    throw new Error(
      `${value.dtype} of shape [${shape}] takes ${byteLength(value.dtype, shape)} bytes; ` +
        `data has ${data.length}`,
    );
  }
  return { dtype: value.dtype, shape: [...shape], data };
}

/** Bytes as base64. */
export function encodeBase64(bytes) {
  const step = 3 * 2 ** 13; // a multiple of 3: no padding inside; few enough to be arguments
  let text = "";
  for (let at = 0; at < bytes.length; at += step) {
    text += btoa(String.fromCharCode(...bytes.subarray(at, at + step)));
  }
  return text;
}

/** The bytes of base64. */
export function decodeBase64(text) {
  let characters;
  try {
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
    if (shape.length > MAX_RANK) throw new Error(`lists are nested more than ${MAX_RANK} deep`);
  }
  const numbers = new Float64Array(countElements(shape));
  const output = { numbers, length: 0, kind: null };
  fillNumbers(lists, shape, [], output);
  const dtype = output.kind === "boolean" ? "bool" : "float64";
  return { ...fromNumbers(numbers, shape, dtype), literal: true };
}

/** Puts the numbers of lists in a row; `path` is where in them this list is. */
function fillNumbers(list, shape, path, output) {
  const depth = path.length;
  if (list.length !== shape[depth]) {
    throw new Error(
      `${formatPath(path)} has ${list.length} entries where the first has ${shape[depth]}`,
    );
  }
  for (let index = 0; index < list.length; index += 1) {
    const entry = list[index];
    path.push(index);
    if (Array.isArray(entry) !== depth + 1 < shape.length) {
      throw new Error(`${formatPath(path)} is ${abbreviate(entry)}; lists must be even`);
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
      `${formatPath(path)} is ${abbreviate(entry)}; numbers are read, "NaN", "Infinity", "-Infinity", ` +
        "or true and false",
    );
  }
  // JSON.parse makes Infinity of what is too large, such as 1e999
  if (Math.abs(entry) === Infinity && typeof entry === "number") {
    throw new Error(`${formatPath(path)} is a number past the largest`);
  }
  output.kind ??= type;
  if (output.kind !== type) {
    throw new Error(
      `${formatPath(path)} is ${abbreviate(entry)} among ${output.kind}s; all are of one kind`,
    );
  }
  return Number(known);
}

function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

function isTensor(value) {
  return isObject(value) && typeof value.data === "string" && "shape" in value && "dtype" in value;
}

function formatPath(path) {
  return path.length ? path.map((index) => `[${index}]`).join("") : "the list";
}

/** A value as a message shows it. */
function abbreviate(value) {
  if (Array.isArray(value) && (value.length > 8 || value.some(Array.isArray))) {
    return `a list of ${value.length}`;
  }
  if (isObject(value)) return "an object";
  return String(JSON.stringify(value)).slice(0, 40);
}
