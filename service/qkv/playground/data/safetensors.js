// Parses and writes .safetensors: a header in JSON, then the bytes of any number of named tensors.

import { formatCount } from "../dom.js";
import { countElements, DTYPE_BYTES, toInt64 } from "./dtypes.js";

const DTYPES = {
  F64: "float64",
  F32: "float32",
  F16: "float16",
  BF16: "bfloat16",
  I64: "int64",
  BOOL: "bool",
};
const SMALLER = "save the attention layers that you need in a file of their own";
const INTEGER_CODES = { I8: "i1", I16: "i2", I32: "i4", U8: "u1", U16: "u2", U32: "u4", U64: "u8" };
const CODES = Object.fromEntries(Object.entries(DTYPES).map(([code, name]) => [name, code]));

const FORMAT_HEADER_BYTES = 100_000_000;
const MAX_HEADER_BYTES = 16 * 2 ** 20; // a header of 59 MB took a minute
const MAX_TENSORS = 65536; // of a request to /v1/layers
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
 * @throws {Error} if the file is incomplete or a dtype is not supported
 */
export function parseSafetensors(bytes) {
  const { header, data } = splitHeader(bytes);
  const entries = Object.entries(header).filter(([name]) => name !== "__metadata__");
  let end = 0;
  for (const [name, entry] of entries.toSorted(([, a], [, b]) => startOf(a) - startOf(b))) {
    checkEntry(name, entry, end);
    end = entry.data_offsets[1];
  }
  if (end !== data.length) {
    throw new Error(
      `this .safetensors has ${data.length} bytes of data, but its header describes ${end}`,
    );
  }
  if (!entries.length) throw new Error("this .safetensors has no tensors");
  return Object.fromEntries(entries.map(([name, entry]) => [name, readTensor(entry, data)]));
}

function splitHeader(bytes) {
  if (bytes.length < 8) throw new Error("this .safetensors is cut off inside its header");
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = Number(view.getBigUint64(0, true));
  checkHeaderLength(length);
  if (length > bytes.length - 8) throw new Error("this .safetensors is cut off inside its header");
  return { header: parseHeader(bytes.subarray(8, 8 + length)), data: bytes.subarray(8 + length) };
}

/**
 * Throws if a header is too long for the format or for this page.
 *
 * @param {number} length as the first 8 bytes of the file give it
 * @throws {Error} a message for the user
 */
export function checkHeaderLength(length) {
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
 * Parses the JSON of a header.
 *
 * @param {Uint8Array} bytes
 * @throws {Error} if it is not an object
 */
export function parseHeader(bytes) {
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch {
    throw new Error("the header of this .safetensors is not JSON");
  }
  if (header === null || typeof header !== "object" || Array.isArray(header)) {
    throw new Error("the header of this .safetensors is not a JSON object");
  }
  return header;
}

/** Returns the service's name of a dtype in a file; undefined if the service has none. */
export const dtypeOf = (code) => (Object.hasOwn(DTYPES, code) ? DTYPES[code] : undefined);

function startOf(entry) {
  return entry?.data_offsets?.[0] ?? 0;
}

/** Checks that a tensor begins where the one before ends, and that its bytes fit its shape. */
function checkEntry(name, entry, expectedStart) {
  const label = `tensor ${JSON.stringify(name)} of this .safetensors`;
  const { dtype, shape, data_offsets: offsets } = entry ?? {};
  if (!Object.hasOwn(DTYPES, dtype) && !Object.hasOwn(INTEGER_CODES, dtype)) {
    const known = [...Object.keys(DTYPES), ...Object.keys(INTEGER_CODES)].join(", ");
    throw new Error(
      `${label} has the unsupported dtype ${JSON.stringify(dtype ?? null)}: expected ${known}`,
    );
  }
  const areSizes = (list) =>
    Array.isArray(list) && list.every((n) => Number.isSafeInteger(n) && n >= 0);
  if (!areSizes(shape) || !areSizes(offsets) || offsets.length !== 2) {
    throw new Error(`${label} has an invalid shape or invalid offsets: expected whole numbers`);
  }
  if (shape.length > 32 || !Number.isSafeInteger(countElements(shape.map((n) => n || 1)) * 8)) {
    throw new Error(`${label} has shape [${shape}], which is too large`);
  }
  const size = INTEGER_CODES[dtype] ? Number(INTEGER_CODES[dtype][1]) : DTYPE_BYTES[DTYPES[dtype]];
  const expectedBytes = size * countElements(shape);
  if (offsets[0] !== expectedStart || offsets[1] - offsets[0] !== expectedBytes) {
    throw new Error(
      `${label} has offsets ${offsets[0]} to ${offsets[1]}, but ${dtype} of shape [${shape}] ` +
        `takes ${expectedStart} to ${expectedStart + expectedBytes}`,
    );
  }
}

function readTensor({ dtype, shape, data_offsets: offsets }, data) {
  const bytes = data.slice(...offsets);
  if (DTYPES[dtype]) return { dtype: DTYPES[dtype], shape, data: bytes };
  return { dtype: "int64", shape, data: toInt64(bytes, INTEGER_CODES[dtype]) };
}

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
