// Parses numpy's .npy, versions 1 to 3: a header with a Python dict, then the bytes of one array.

import { countElements, toInt64 } from "./dtypes.js";

const MAGIC = [0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59]; // \x93NUMPY
const DTYPES = { f8: "float64", f4: "float32", f2: "float16", i8: "int64", b1: "bool" };
const INTEGER_CODES = ["i1", "i2", "i4", "u1", "u2", "u4", "u8"]; // converted to int64

/** True if the bytes begin with the magic of .npy. */
export function isNpy(bytes) {
  return MAGIC.every((byte, index) => bytes[index] === byte);
}

/**
 * Parses a .npy; converts Fortran order and big-endian numbers.
 *
 * @param {Uint8Array} bytes of the whole file
 * @returns {{dtype: string, shape: number[], data: Uint8Array}}
 * @throws {Error} if the file is incomplete or its dtype is not supported
 */
export function parseNpy(bytes) {
  const { header, dataStart } = splitHeader(bytes);
  const { order, code, isFortran, shape } = parseHeader(header);
  const size = Number(code[1]);
  const expectedBytes = size * countElements(shape);
  const data = bytes.subarray(dataStart);
  if (data.length !== expectedBytes) {
    throw new Error(
      `this .npy has ${data.length} bytes of data, but shape (${shape.join(", ")}) ` +
        `of '${order}${code}' takes ${expectedBytes}`,
    );
  }
  const littleEndian = order === ">" ? swapBytes(data, size) : data;
  const dense =
    isFortran && shape.length > 1 ? rowMajor(littleEndian, shape, size) : littleEndian.slice();
  if (DTYPES[code]) return { dtype: DTYPES[code], shape, data: dense };
  return { dtype: "int64", shape, data: toInt64(dense, code) };
}

function splitHeader(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const version = bytes[6];
  const prefixBytes = version === 1 ? 10 : 12;
  if (bytes.length < prefixBytes) throw new Error("this .npy is cut off inside its header");
  if (version < 1 || version > 3) {
    throw new Error(`version ${version} of .npy is not supported: expected 1, 2 or 3`);
  }
  const length = version === 1 ? view.getUint16(8, true) : view.getUint32(8, true);
  if (prefixBytes + length > bytes.length)
    throw new Error("this .npy is cut off inside its header");
  const header = new TextDecoder(version === 3 ? "utf-8" : "latin1").decode(
    bytes.subarray(prefixBytes, prefixBytes + length),
  );
  return { header, dataStart: prefixBytes + length };
}

function parseHeader(header) {
  const shown = header.trim().slice(0, 120);
  const descr = /'descr'\s*:\s*'([^']*)'/.exec(header)?.[1];
  const order = /'fortran_order'\s*:\s*(True|False)/.exec(header)?.[1];
  const sizes = /'shape'\s*:\s*\(([\d\s,L]*)\)/.exec(header)?.[1];
  if (descr === undefined && /'descr'\s*:\s*\[/.test(header)) {
    throw new Error("structured arrays are not supported: save each field as an array");
  }
  if (descr === undefined || order === undefined || sizes === undefined) {
    throw new Error(`the header of this .npy is invalid: ${shown}`);
  }
  const shape = (sizes.match(/\d+/g) ?? []).map(Number);
  if (shape.length > 32 || !Number.isSafeInteger(countElements(shape.map((n) => n || 1)) * 8)) {
    throw new Error(`shape (${shape.join(", ")}) is too large`);
  }
  return { order: descr[0], code: checkDtype(descr), isFortran: order === "True", shape };
}

function checkDtype(descr) {
  const code = descr.slice(1);
  if (/^[<>|=]/.test(descr) && (Object.hasOwn(DTYPES, code) || INTEGER_CODES.includes(code)))
    return code;
  if (code === "V2") {
    throw new Error(
      "this .npy has no dtype name for its 2-byte elements, as numpy writes bfloat16: " +
        "save .safetensors instead",
    );
  }
  throw new Error(
    `dtype '${descr}' is not supported: expected floats of 16, 32 or 64 bits, integers ` +
      "or booleans",
  );
}

function swapBytes(data, size) {
  const out = new Uint8Array(data.length);
  for (let at = 0; at < data.length; at += 1)
    out[at] = data[at - (at % size) + size - 1 - (at % size)];
  return out;
}

/** Reorders bytes from Fortran order (first index fastest) to row-major order. */
function rowMajor(data, shape, size) {
  const out = new Uint8Array(data.length);
  const strides = shape.map((_, axis) => size * countElements(shape.slice(0, axis)));
  const index = shape.map(() => 0);
  for (let to = 0, from = 0; to < out.length; to += size) {
    for (let byte = 0; byte < size; byte += 1) out[to + byte] = data[from + byte];
    for (let axis = shape.length - 1; axis >= 0; axis -= 1) {
      index[axis] += 1;
      from += strides[axis];
      if (index[axis] < shape[axis]) break;
      from -= strides[axis] * shape[axis];
      index[axis] = 0;
    }
  }
  return out;
}
