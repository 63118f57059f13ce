// Reads the file of a captured model: its calls from the header, the tensors of one call or of one
// head from their place in the file. The file is never read whole.

import { readHeader, readRange } from "../checkpoint/checkpoint_files.js";
import { byteLength, countElements } from "../data/dtypes.js";
import { dtypeOf, isSafetensors } from "../data/safetensors.js";
import { isObject, parseJson } from "../data/tensors.js";

const KEY = "qkv_calls"; // of the metadata
const TOKENS = "qkv_tokens"; // of the metadata: tokens of each sequence by its number
const REQUIRED = ["query", "key", "value"];
const OPTIONAL = ["sinks", "mask"]; // the mask is last: its bytes need no alignment
const FLOATS = ["float64", "float32", "float16", "bfloat16"];

/**
 * Reads the calls of a file.
 *
 * @param {File} file
 * @returns {Promise<Object[]|null>} null if the file has none. A call is {index, file, layer, heads,
 *   items, tokens, parameters, tensors}: `heads`, `items`: the numbers of heads and sequences in the
 *   model; `tokens`: a list for each sequence, empty if the file has none; `parameters` of softmax;
 *   `tensors` by name, {dtype, shape, start, end}
 * @throws {Error} a message for the user
 */
export async function readCalls(file) {
  const head = await file
    .slice(0, 9)
    .arrayBuffer()
    .catch(() => new ArrayBuffer());
  if (!isSafetensors(new Uint8Array(head))) return null;
  const header = await readHeader(file).catch(() => null); // another reader says why
  if (!header || !Object.hasOwn(header.metadata, KEY)) return null;
  try {
    const table = new Map(header.tensors);
    const tokens = parseTokens(header.metadata[TOKENS] ?? "{}");
    return parseCalls(header.metadata[KEY]).map((call, index) => ({
      file,
      ...readCall(call, index, table),
      tokens: numbersOf(call.items).map((item) => tokens[item] ?? []),
    }));
  } catch (error) {
    throw new Error(`${file.name}: ${error.message}`);
  }
}

/**
 * Reads the tensors of some heads of a call.
 *
 * @param {Object} call
 * @param {number} first place of the first head in the call
 * @param {number} last place after the last one; key heads that are shared are read whole
 * @returns {Promise<Object>} {dtype, shape, data} by name
 */
export async function readHeads({ file, heads, tensors }, first = 0, last = heads.length) {
  const entries = Object.entries(tensors).map(async ([name, tensor]) => {
    const axis = name === "sinks" ? 0 : tensor.shape.length - 3;
    const group = heads.length / (tensor.shape[axis] ?? 1); // query heads that share one
    const range = [Math.floor(first / group), Math.floor((last - 1) / group) + 1];
    return [name, await readSlices(file, tensor, axis, range)];
  });
  return Object.fromEntries(await Promise.all(entries));
}

/** Reads the indices `from` to `to` of an axis. */
async function readSlices(file, { dtype, shape, start, end }, axis, [from, to]) {
  if (axis < 0 || to - from === shape[axis]) {
    return { dtype, shape, data: await readRange(file, start, end) };
  }
  const size = byteLength(dtype, shape.slice(axis + 1));
  const data = new Uint8Array(countElements(shape.slice(0, axis)) * (to - from) * size);
  const reads = Array.from({ length: countElements(shape.slice(0, axis)) }, async (_, item) => {
    const at = start + (item * shape[axis] + from) * size;
    data.set(await readRange(file, at, at + (to - from) * size), item * (to - from) * size);
  });
  await Promise.all(reads);
  return { dtype, shape: shape.with(axis, to - from), data };
}

function parseCalls(text) {
  let calls;
  try {
    calls = parseJson(text);
  } catch (error) {
    throw new Error(`the metadata ${KEY} is invalid: ${error.message}`);
  }
  if (!Array.isArray(calls) || !calls.length || !calls.every(isObject)) {
    throw new Error(`the metadata ${KEY} is invalid: expected a list with an object for each call`);
  }
  return calls;
}

const numbersOf = (list) => (Array.isArray(list) ? list : []);

function parseTokens(text) {
  const tokens = parseJson(text);
  const isList = (one) => Array.isArray(one) && one.every((token) => typeof token === "string");
  if (isObject(tokens) && Object.values(tokens).every(isList)) return tokens;
  throw new Error(`the metadata ${TOKENS} is invalid: expected a list of texts by sequence`);
}

function readCall(call, index, table) {
  const { layer, heads } = call;
  if (typeof layer !== "string") throw new Error(`call ${index} has no layer: expected its name`);
  const named = [...REQUIRED, ...OPTIONAL]
    .filter((name) => REQUIRED.includes(name) || table.has(`calls.${index}.${name}`))
    .map((name) => [name, readEntry(table, `calls.${index}.${name}`, REQUIRED.includes(name))]);
  const tensors = Object.fromEntries(named);
  const count = checkShapes(tensors, index);
  const isList = Array.isArray(heads) && heads.every((n) => Number.isSafeInteger(n) && n >= 0);
  if (!isList || heads.length !== count) {
    throw new Error(
      `heads of call ${index} are invalid: got ${JSON.stringify(heads ?? null)}, ` +
        `expected the numbers of its ${count} heads`,
    );
  }
  return {
    index,
    layer,
    heads,
    items: numbersOf(call.items),
    parameters: softmaxParameters(call),
    tensors,
  };
}

function readEntry(table, name, isFloat) {
  const entry = table.get(name);
  if (!entry) throw new Error(`tensor ${name} is missing`);
  const dtype = dtypeOf(entry.dtype);
  if (!FLOATS.includes(dtype) && (isFloat || dtype !== "bool")) {
    throw new Error(
      `${name} has an unsupported dtype: got ${entry.dtype}, expected ${FLOATS.join(", ")}`,
    );
  }
  return { ...entry, dtype };
}

/** Checks the shapes of a call's tensors; returns the number of query heads. */
function checkShapes({ query, key, value, sinks, mask }, index) {
  const [B, H, , D] = query.shape;
  const [, G, S] = key.shape;
  const list = [query, key, value].map(({ shape }) => `[${shape}]`).join(", ");
  const isValid =
    [query, key, value].every(({ shape }) => shape.length === 4 && shape[0] === B) &&
    [key.shape[3] === D, value.shape[1] === G, value.shape[2] === S, H % G === 0].every(Boolean);
  if (!isValid) {
    throw new Error(
      `query, key and value of call ${index} have shapes that do not fit: got ${list}, ` +
        "expected (B, H, L, D), (B, G, S, D) and (B, G, S, E)",
    );
  }
  const fits = (axis, size) => axis === undefined || axis === 1 || axis === size;
  if (sinks && (sinks.shape.length !== 1 || sinks.shape[0] !== H)) {
    throw new Error(`sinks of call ${index} have shape [${sinks.shape}], expected [${H}]`);
  }
  if (mask && (mask.shape.length > 4 || !fits(mask.shape.at(-3), H))) {
    throw new Error(`mask of call ${index} has shape [${mask.shape}], expected one for ${H} heads`);
  }
  return H;
}

/** Returns the parameters that differ from their defaults, as the service names them. */
function softmaxParameters({ causal, query_offset: offset, scale, softcap, window }) {
  const isWindow = Array.isArray(window) && window.some((width) => width !== null);
  const values = {
    causal: causal || undefined,
    query_offset: ((causal || isWindow) && offset) || undefined,
    scale: scale ?? undefined,
    softcap: softcap ?? undefined,
    window: isWindow ? window : undefined,
  };
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));
}
