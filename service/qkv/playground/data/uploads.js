// Reads what a user uploads or pastes: files, JSON, tables, printed arrays, requests and curl.
//
// An upload is {tensors, request, labels}: tensors by name, and {variant, fields} where the text is
// a request, or null. `fields` are the fields of the body beside `inputs`. `labels` are the words of
// a table.

import { pickleMessage } from "../checkpoint/checkpoint_files.js";
import { parseLiterals } from "./literals.js";
import { isNpy, parseNpy } from "./npy.js";
import { isZip, parseNpz } from "./npz.js";
import { isSafetensors, parseSafetensors } from "./safetensors.js";
import { isTable, parseTable } from "./tables.js";
import { isObject, MAX_TEXT_LENGTH, parseJson, parseTensors } from "./tensors.js";

/** Larger files are rejected unread: a service with default settings rejects them too. */
export const MAX_FILE_BYTES = 256 * 2 ** 20;

const WHITESPACE = [9, 10, 12, 13]; // control characters that a text has

const BODY_OPTIONS = ["--json", "-d", "--data", "--data-raw", "--data-binary", "--data-ascii"];
const OWN_PATH = /\/v1\/(?:attention|gradients)\/([^/?#]+)/;

/**
 * Reads a file: .npy (its tensor is named after the file), .npz, .safetensors or a text. The first
 * bytes decide which, not the name.
 *
 * @param {File} file
 * @param {{maxBytes?: number}} options
 * @returns {Promise<{tensors: Object, request: Object|null}>}
 * @throws {Error} a message for the user
 */
export async function readFile(file, { maxBytes = MAX_FILE_BYTES } = {}) {
  try {
    if (file.size > maxBytes) {
      throw new Error(`file too large: ${file.size} bytes, the limit is ${maxBytes}`);
    }
    return await parseBytes(new Uint8Array(await file.arrayBuffer()), file.name, maxBytes);
  } catch (error) {
    throw new Error(`${file.name}: ${error.message}`);
  }
}

async function parseBytes(bytes, fileName, maxBytes) {
  const [, stem, suffix] = /^(.+?)(\.[^.]*)?$/.exec(fileName);
  if (!bytes.length) throw new Error("the file is empty");
  if (isNpy(bytes))
    return { tensors: Object.fromEntries([[stem, parseNpy(bytes)]]), request: null };
  if (isSafetensors(bytes)) return { tensors: parseSafetensors(bytes), request: null };
  if (suffix === ".npy" || suffix === ".safetensors") {
    throw new Error(`the content is not ${suffix}: its first bytes are different`);
  }
  if (isZip(bytes)) {
    return { tensors: await parseNpz(bytes, { maxBytes, fileName }), request: null };
  }
  if (/^\.(pt|pth|bin|ckpt)$/.test(suffix)) throw new Error(pickleMessage(fileName));
  return readText(decodeText(bytes), { name: stem });
}

/** Decodes UTF-8, or else Windows-1252, in which Excel saves CSV. */
function decodeText(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    if (bytes.some((byte) => byte < 32 && !WHITESPACE.includes(byte))) {
      throw new Error("unknown format: expected .npy, .npz, .safetensors or a text");
    }
    return new TextDecoder("windows-1252").decode(bytes);
  }
}

/**
 * Reads a text: a table, lists and arrays as Python prints them, tensors by name as JSON, the JSON
 * body of a request, or a curl command.
 *
 * @param {string} text
 * @param {{name?: string}} options `name`: for a tensor without one
 * @returns {{tensors: Object, request: {variant: string|null, fields: Object}|null, labels?: string[]}}
 * @throws {Error} a message for the user
 */
export function readText(text, { name = "tensor" } = {}) {
  const isCommand = /^\s*\$?\s*curl\s/.test(text);
  const { variant, body } = isCommand ? parseCommand(text) : { variant: null, body: text };
  if (text.length <= MAX_TEXT_LENGTH && !isCommand && isTable(text)) {
    const { rows, labels } = parseTable(text);
    return { tensors: parseTensors(rows, name), request: null, labels };
  }
  const value = parseValues(body, isCommand ? null : name);
  if (!isObject(value) || !("inputs" in value)) {
    if (isObject(value) && "lengths" in value) {
      throw new Error("this request has no inputs: a sweep draws its tensors at random");
    }
    return { tensors: parseTensors(value, name), request: null };
  }
  const { inputs, ...fields } = value;
  if (Array.isArray(inputs) && inputs.every((one) => isObject(one) && "datatype" in one)) {
    throw new Error(
      "Open Inference Protocol requests are not supported: paste one of /v1/attention",
    );
  }
  return { tensors: parseTensors(inputs, name), request: { variant, fields } };
}

/** Parses JSON; without it, lists as Python writes them, by name. `name` null: JSON alone. */
function parseValues(text, name) {
  try {
    return parseJson(text);
  } catch (error) {
    if (name === null || text.length > MAX_TEXT_LENGTH || !text.trim()) throw error;
    if (/^\s*\{(?!\s*')/.test(text)) throw error; // JSON's message has the place
    return parseLiterals(text, name);
  }
}

/** Returns variant and body of a curl command as bash reads it. */
function parseCommand(text) {
  const words = splitCommand(text);
  const address = words.find((word) => word.includes("/v1/")) ?? "";
  const isBody = (word, at) => BODY_OPTIONS.includes(words[at - 1]);
  const body = words.find(isBody);
  if (body === undefined) throw new Error("this curl command has no body: expected --json '{...}'");
  if (body.startsWith("@")) {
    throw new Error(`the body of this curl command is in ${body.slice(1)}: upload that file`);
  }
  return { variant: OWN_PATH.exec(address)?.[1] ?? null, body };
}

/** Splits a command into words, without its quotes and escapes. */
function splitCommand(text) {
  const parts = /'([^']*)'|"((?:[^"\\]|\\[^])*)"|\\([^])|(\s+)|([^\s'"\\]+)/g;
  const words = [""];
  for (const [, single, double, escaped, space, plain] of text.matchAll(parts)) {
    if (space) words.push("");
    else if (escaped) words[words.length - 1] += escaped === "\n" ? "" : escaped;
    else words[words.length - 1] += single ?? double?.replace(/\\(["\\$`])/g, "$1") ?? plain ?? "";
  }
  return words.filter(Boolean);
}
