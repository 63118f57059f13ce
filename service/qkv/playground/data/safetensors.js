// Parses and writes .safetensors: a header in JSON, then the bytes of any number of named tensors.

import { formatCount } from "../dom.js";
import { countElements, DTYPE_BYTES, toInt64 } from "./dtypes.js";
import { isObject } from "./tensors.js";

const DTYPES = {
  F64: "float64",
  F32: "float32",
  F16: "float16",
  BF16: "bfloat16",
  I64: "int64",
  BOOL: "bool",
};
const BITS = {
  ...bitsOf(4, "F4"),
  ...bitsOf(6, "F6_E2M3 F6_E3M2"),
  ...bitsOf(8, "BOOL U8 I8 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0"),
  ...bitsOf(16, "U16 I16 F16 BF16"),
  ...bitsOf(32, "U32 I32 F32"),
  ...bitsOf(64, "U64 I64 F64 C64"),
};
const SMALLER = "save the attention layers that you need in a file of their own";
const CODES = Object.fromEntries(Object.entries(DTYPES).map(([code, name]) => [name, code]));

export const LENGTH_BYTES = 8;
const FORMAT_HEADER_BYTES = 100_000_000;
const MAX_HEADER_BYTES = 16 * 2 ** 20; // a header of 59 MB took a minute
const MAX_TENSORS = 65536; // of a request to /v1/layers
const MAX_AXES = 8;
const MAX_NAME_LENGTH = 1024;
const ALIGNMENT = 64; // of the first tensor, as the service writes files

/** True if the bytes begin as .safetensors does: the header's length, then `{`. */
export function isSafetensors(bytes) {
  return bytes.length > 8 && bytes[8] === 0x7b && bytes[7] === 0 && bytes[6] === 0;
}

/**
 * Parses a .safetensors; tensors keep their order.
 *
 * @param {Uint8Array} bytes of the whole file
 * @returns {Object<string, {dtype: string, shape: number[], data: Uint8Array}>}
 * @throws {Error} if the file is invalid or a dtype is not supported
 */
export function parseSafetensors(bytes) {
  const start = LENGTH_BYTES + headerLength(bytes, bytes.length);
  const data = bytes.subarray(start);
  const { tensors } = parseHeader(bytes.subarray(LENGTH_BYTES, start), data.length);
  return Object.fromEntries(tensors.map(([name, entry]) => [name, readTensor(name, entry, data)]));
}

/**
 * Returns the length of a header.
 *
 * @param {Uint8Array} head at least the first 8 bytes of the file, if it has as many
 * @param {number} size bytes of the file
 * @throws {Error} a message for the user, if it is too long for the file, the format or this page
 */
export function headerLength(head, size) {
  if (size < LENGTH_BYTES) throw new Error("this .safetensors is cut off inside its header");
  const view = new DataView(head.buffer, head.byteOffset, head.byteLength);
  const length = Number(view.getBigUint64(0, true));
  if (length > FORMAT_HEADER_BYTES) {
    throw new Error(
      `this is not a safetensors file: its first 8 bytes give a header of ${length} bytes, ` +
        `and the format allows ${FORMAT_HEADER_BYTES}`,
    );
  }
  if (length > MAX_HEADER_BYTES) {
    throw new Error(
      `the header of this .safetensors takes ${formatCount(length, "B")}, and this page reads at ` +
        `most ${formatCount(MAX_HEADER_BYTES, "B")}: ${SMALLER}`,
    );
  }
  if (length > size - LENGTH_BYTES) {
    throw new Error(
      `this .safetensors is cut off inside its header: it has ${size} bytes, ` +
        `and the header alone takes ${length}`,
    );
  }
  return length;
}

/**
 * Throws if there are more tensors than the service takes in a list of names.
 *
 * @param {number} count
 * @throws {Error} a message for the user
 */
export function checkTensorCount(count) {
  if (count > MAX_TENSORS) {
    throw new Error(`there are ${count} tensors, and this page reads ${MAX_TENSORS}: ${SMALLER}`);
  }
}

/**
 * Parses a header, and checks that its tensors take the bytes behind it without gaps. The verdict
 * is that of the service (wire/safetensors_header.py), for files of every dtype.
 *
 * @param {Uint8Array} bytes
 * @param {number} size bytes behind the header
 * @returns {{tensors: Array, metadata: Object<string, string>}} `tensors`: pairs of a name and
 *   {dtype, shape, start, end}; `dtype` as in the file, `start` and `end` behind the header
 * @throws {Error} a message for the user
 */
export function parseHeader(bytes, size) {
  const { header, metadata } = parseNames(bytes);
  const tensors = Object.entries(header).map(([name, entry]) => [name, readEntry(name, entry)]);
  if (!tensors.length) throw new Error("this .safetensors has no tensors");
  let at = 0;
  const byPlace = ([, a], [, b]) => a.start - b.start || a.end - b.end; // an empty one is first
  for (const [name, { start, end }] of tensors.toSorted(byPlace)) {
    if (start !== at || end > size) {
      throw new Error(
        `${labelOf(name)} has bytes ${start} to ${end} of ${size}, but the tensor before it ends ` +
          `at ${at}: the file is damaged or cut off`,
      );
    }
    at = end;
  }
  if (at !== size) throw new Error(`${size - at} bytes of this .safetensors belong to no tensor`);
  return { tensors, metadata };
}

/** Parses the JSON of a header, with the rules that JSON.parse does not have. */
function parseNames(bytes) {
  let text, parsed;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    parsed = JSON.parse(text);
  } catch {
    throw new Error("the header of this .safetensors is not JSON");
  }
  if (!text.startsWith("{")) throw new Error("the header of this .safetensors is no JSON object");
  const { __metadata__: given, ...header } = parsed;
  const metadata = given ?? {};
  const texts = isObject(metadata) ? Object.values(metadata) : [null];
  if (!texts.every((value) => typeof value === "string" && value.isWellFormed())) {
    throw new Error("__metadata__ of this .safetensors is invalid: expected an object of texts");
  }
  const bare = text.replace(/"(?:[^"\\]+|\\.)*"/g, "");
  if (/[-.]|\de/i.test(bare)) {
    throw new Error("a number of this header is invalid: expected whole numbers, 0 or more");
  }
  const objects = [parsed, metadata, ...Object.values(header)].filter(isObject);
  const names = objects.flatMap((object) => Object.keys(object));
  if (names.length !== bare.split(":").length - 1) {
    throw new Error("a name appears twice in the header of this .safetensors");
  }
  if (!names.every((name) => name.length <= MAX_NAME_LENGTH && name.isWellFormed())) {
    throw new Error(`a name is invalid: expected at most ${MAX_NAME_LENGTH} characters`);
  }
  return { header, metadata };
}

/** Returns the service's name of a dtype in a file; undefined if the service has none. */
export const dtypeOf = (code) => (Object.hasOwn(DTYPES, code) ? DTYPES[code] : undefined);

const labelOf = (name) => `tensor ${JSON.stringify(name)}`;

function bitsOf(bits, codes) {
  return Object.fromEntries(codes.split(" ").map((code) => [code, bits]));
}

/** Returns the entry of a tensor, whose dtype and shape fit its number of bytes. */
function readEntry(name, entry) {
  const label = labelOf(name);
  if (!isObject(entry) || Object.keys(entry).toSorted().join() !== "data_offsets,dtype,shape") {
    throw new Error(`${label} has the wrong fields: expected dtype, shape and data_offsets only`);
  }
  const { dtype, shape, data_offsets: offsets } = entry;
  if (typeof dtype !== "string" || !Object.hasOwn(BITS, dtype)) {
    const known = Object.keys(BITS).join(", ");
    throw new Error(`${label} has the unknown dtype ${JSON.stringify(dtype)}: expected ${known}`);
  }
  const areSizes = (list) => Array.isArray(list) && list.every((n) => Number.isSafeInteger(n));
  if (!areSizes(shape) || !areSizes(offsets) || offsets.length !== 2 || offsets[0] > offsets[1]) {
    throw new Error(`${label} has an invalid shape or invalid offsets: expected whole numbers`);
  }
  const bytesOf = (sizes) => (BITS[dtype] / 8) * countElements(sizes);
  if (shape.length > MAX_AXES || bytesOf(shape.map((n) => n || 1)) > Number.MAX_SAFE_INTEGER) {
    throw new Error(`${label} has shape [${shape}], which is too large`);
  }
  const [start, end] = offsets;
  if (end - start !== bytesOf(shape)) {
    throw new Error(
      `${label} has ${end - start} bytes, but ${dtype} of shape [${shape}] takes ${bytesOf(shape)}`,
    );
  }
  return { dtype, shape, start, end };
}

function readTensor(name, { dtype, shape, start, end }, data) {
  const bytes = data.slice(start, end);
  if (DTYPES[dtype]) return { dtype: DTYPES[dtype], shape, data: bytes };
  if (/^[IU]/.test(dtype)) return { dtype: "int64", shape, data: toInt64(bytes, numpyCode(dtype)) };
  const known = Object.keys(BITS).filter((code) => DTYPES[code] || /^[IU]/.test(code));
  throw new Error(
    `${labelOf(name)} has the unsupported dtype "${dtype}": expected ${known.join(", ")}`,
  );
}

const numpyCode = (dtype) => `${dtype[0].toLowerCase()}${BITS[dtype] / 8}`;

/**
 * Writes a .safetensors. The tensors with the longest numbers are first, so that all are aligned.
 *
 * @param {Object<string, {dtype: string, shape: number[], data: Uint8Array}>} tensors by name
 * @param {Object<string, string>|null} metadata
 * @returns {Blob}
 */
export function formatSafetensors(tensors, metadata = null) {
  const header = metadata ? { __metadata__: metadata } : {};
  const sizeOf = ([, { dtype }]) => DTYPE_BYTES[dtype];
  const named = Object.entries(tensors).toSorted((a, b) => sizeOf(b) - sizeOf(a));
  let end = 0;
  for (const [name, { dtype, shape, data }] of named) {
    header[name] = { dtype: CODES[dtype], shape, data_offsets: [end, end + data.length] };
    end += data.length;
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const padding = " ".repeat((ALIGNMENT - ((8 + text.length) % ALIGNMENT)) % ALIGNMENT);
  const length = new DataView(new ArrayBuffer(8));
  length.setBigUint64(0, BigInt(text.length + padding.length), true);
  return new Blob([length, text, padding, ...named.map(([, { data }]) => data)]);
}
