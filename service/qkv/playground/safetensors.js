// .safetensors: any number of tensors by name, behind a header in JSON.

import { SIZES, count, widened } from "./dtypes.js";

const DTYPES = {
  F64: "float64",
  F32: "float32",
  F16: "float16",
  BF16: "bfloat16",
  I64: "int64",
  BOOL: "bool",
};
const WHOLE = { I8: "i1", I16: "i2", I32: "i4", U8: "u1", U16: "u2", U32: "u4", U64: "u8" };
const MAX_HEADER = 100_000_000; // bytes; the format's own bound

/** Whether bytes begin as a .safetensors does: a header's length, and `{`. */
export function isSafetensors(bytes) {
  return bytes.length > 8 && bytes[8] === 0x7b && bytes[7] === 0 && bytes[6] === 0;
}

/**
 * The tensors of a .safetensors, in its order.
 *
 * @param {Uint8Array} bytes of the whole file
 * @returns {Object<string, {dtype: string, shape: number[], data: Uint8Array}>}
 * @throws {Error} it is no whole .safetensors, or one of its dtypes does not travel
 */
export function parseSafetensors(bytes) {
  const { header, data } = split(bytes);
  const entries = Object.entries(header).filter(([name]) => name !== "__metadata__");
  let end = 0;
  for (const [name, entry] of entries.toSorted(([, a], [, b]) => begin(a) - begin(b))) {
    check(name, entry, end);
    end = entry.data_offsets[1];
  }
  if (end !== data.length) {
    throw new Error(
      `this .safetensors holds ${data.length} bytes of data; its header names ${end}`,
    );
  }
  if (!entries.length) throw new Error("this .safetensors holds no tensors");
  return Object.fromEntries(entries.map(([name, entry]) => [name, tensor(entry, data)]));
}

function split(bytes) {
  if (bytes.length < 8) throw new Error("this .safetensors ends inside its header");
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = Number(view.getBigUint64(0, true));
  if (length > MAX_HEADER || length > bytes.length - 8) {
    throw new Error("this .safetensors ends inside its header, or is none");
  }
  let header;
  try {
    header = JSON.parse(
      new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + length)),
    );
  } catch {
    throw new Error("the header of this .safetensors is not JSON");
  }
  if (header === null || typeof header !== "object" || Array.isArray(header)) {
    throw new Error("the header of this .safetensors is not a JSON object");
  }
  return { header, data: bytes.subarray(8 + length) };
}

function begin(entry) {
  return entry?.data_offsets?.[0] ?? 0;
}

/** Tensors lie one behind the other, each as long as its shape says. */
function check(name, entry, expected) {
  const where = `tensor ${JSON.stringify(name)} of this .safetensors`;
  const { dtype, shape, data_offsets: offsets } = entry ?? {};
  if (!Object.hasOwn(DTYPES, dtype) && !Object.hasOwn(WHOLE, dtype)) {
    const known = [...Object.keys(DTYPES), ...Object.keys(WHOLE)].join(", ");
    throw new Error(`${where} is of dtype ${JSON.stringify(dtype ?? null)}; ${known} are read`);
  }
  const whole = (list) =>
    Array.isArray(list) && list.every((n) => Number.isSafeInteger(n) && n >= 0);
  if (!whole(shape) || !whole(offsets) || offsets.length !== 2) {
    throw new Error(`${where} has no shape and offsets of whole numbers`);
  }
  if (shape.length > 32 || !Number.isSafeInteger(count(shape.map((n) => n || 1)) * 8)) {
    throw new Error(`${where} has shape [${shape}], past what can be counted`);
  }
  const size = WHOLE[dtype] ? Number(WHOLE[dtype][1]) : SIZES[DTYPES[dtype]];
  const needed = size * count(shape);
  if (offsets[0] !== expected || offsets[1] - offsets[0] !== needed) {
    throw new Error(
      `${where} lies at bytes ${offsets[0]} to ${offsets[1]} where ${dtype} of shape [${shape}] ` +
        `lies at ${expected} to ${expected + needed}`,
    );
  }
}

function tensor({ dtype, shape, data_offsets: offsets }, data) {
  const bytes = data.slice(...offsets);
  if (DTYPES[dtype]) return { dtype: DTYPES[dtype], shape, data: bytes };
  return { dtype: "int64", shape, data: widened(bytes, WHOLE[dtype]) };
}
