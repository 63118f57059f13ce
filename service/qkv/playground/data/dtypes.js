// Converts tensors to numbers and back, for the dtypes of the service.
//
// A tensor is an object as the service has it:
//   {dtype: "float32", shape: [2, 3], data: Uint8Array}    little-endian, row-major, dense

/** Bytes of one element by dtype. */
export const DTYPE_BYTES = { float64: 8, float32: 4, float16: 2, bfloat16: 2, int64: 8, bool: 1 };

// fraction bits, exponent of the smallest normal number
const HALF_FORMATS = { float16: [10, -14], bfloat16: [7, -126] };

/** Returns the number of elements of a shape. */
export function countElements(shape) {
  return shape.reduce((product, size) => product * size, 1);
}

/** Returns the bytes of a dense tensor. */
export function byteLength(dtype, shape) {
  return DTYPE_BYTES[dtype] * countElements(shape);
}

/**
 * Returns the numbers of a tensor in row-major order.
 *
 * @returns {Float64Array} booleans as 0 and 1; integers above 2^53 rounded
 */
export function toNumbers({ dtype, shape, data }) {
  if (dtype === "float32") return Float64Array.from(new Float32Array(data.slice().buffer)); // aligned
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const read = {
    float64: (at) => view.getFloat64(at, true),
    float16: (at) => fromHalf(view.getUint16(at, true), ...HALF_FORMATS.float16),
    bfloat16: (at) => fromHalf(view.getUint16(at, true), ...HALF_FORMATS.bfloat16),
    int64: (at) => Number(view.getBigInt64(at, true)),
    bool: (at) => Number(view.getUint8(at) !== 0),
  }[dtype];
  const size = DTYPE_BYTES[dtype];
  const numbers = new Float64Array(countElements(shape));
  for (let index = 0; index < numbers.length; index += 1) numbers[index] = read(index * size);
  return numbers;
}

/**
 * Makes a tensor; each number is rounded to the nearest of the dtype, ties to even.
 *
 * @throws {Error} for int64 if a number is not whole, for bool if it is not 0 or 1
 */
export function fromNumbers(numbers, shape, dtype = "float32") {
  if (!Object.hasOwn(DTYPE_BYTES, dtype)) throw new Error(unknownDtypeMessage(dtype));
  const data = new Uint8Array(byteLength(dtype, shape));
  const view = new DataView(data.buffer);
  const write = {
    float64: (at, number) => view.setFloat64(at, number, true),
    float32: (at, number) => view.setFloat32(at, number, true),
    float16: (at, number) => view.setUint16(at, toHalf(number, ...HALF_FORMATS.float16), true),
    bfloat16: (at, number) => view.setUint16(at, toHalf(number, ...HALF_FORMATS.bfloat16), true),
    int64: (at, number) => {
      if (!Number.isSafeInteger(number)) throw new Error(`${number} is not a whole number`);
      view.setBigInt64(at, BigInt(number), true);
    },
    bool: (at, number) => {
      if (number !== 0 && number !== 1) throw new Error(`${number} is neither true nor false`);
      view.setUint8(at, number);
    },
  }[dtype];
  const size = DTYPE_BYTES[dtype];
  for (let index = 0; index < numbers.length; index += 1) write(index * size, numbers[index]);
  return { dtype, shape: [...shape], data };
}

/**
 * Converts integers of any width to int64.
 *
 * @param {string} code numpy's code: i or u, and the bytes
 * @throws {Error} if an integer exceeds int64
 */
export function toInt64(data, code) {
  const size = Number(code[1]);
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const out = new Uint8Array((data.length / size) * DTYPE_BYTES.int64);
  const wideView = new DataView(out.buffer);
  const read = {
    i1: (at) => BigInt(view.getInt8(at)),
    i2: (at) => BigInt(view.getInt16(at, true)),
    i4: (at) => BigInt(view.getInt32(at, true)),
    u1: (at) => BigInt(view.getUint8(at)),
    u2: (at) => BigInt(view.getUint16(at, true)),
    u4: (at) => BigInt(view.getUint32(at, true)),
    u8: (at) => view.getBigUint64(at, true),
  }[code];
  for (let at = 0; at < data.length; at += size) {
    const number = read(at);
    if (number >= 1n << 63n) throw new Error(`${number} is too large for int64`);
    wideView.setBigInt64((at / size) * DTYPE_BYTES.int64, number, true);
  }
  return out;
}

/** Returns the message for a dtype that the service does not support. */
export function unknownDtypeMessage(dtype) {
  const known = Object.keys(DTYPE_BYTES).join(", ");
  return `dtype ${JSON.stringify(dtype)} is not supported: expected ${known}`;
}

function fromHalf(bits, fractionBits, minExponent) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits & 0x7fff) >> fractionBits;
  const fractionValue = bits & (2 ** fractionBits - 1);
  if (exponent === 2 ** (15 - fractionBits) - 1) return fractionValue ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fractionValue * 2 ** (minExponent - fractionBits);
  return (
    sign * (2 ** fractionBits + fractionValue) * 2 ** (exponent - 1 + minExponent - fractionBits)
  );
}

function toHalf(number, fractionBits, minExponent) {
  const infinity = (2 ** (15 - fractionBits) - 1) << fractionBits;
  if (Number.isNaN(number)) return infinity | (1 << (fractionBits - 1));
  const sign = number < 0 || Object.is(number, -0) ? 0x8000 : 0;
  const size = Math.abs(number);
  if (size === Infinity) return sign | infinity;
  const exponent = Math.max(Math.floor(Math.log2(size)), minExponent); // log2(0) is -Infinity
  const scaled = size / 2 ** (exponent - fractionBits);
  let whole = Math.floor(scaled);
  const remainder = scaled - whole;
  if (remainder > 0.5 || (remainder === 0.5 && whole % 2 === 1)) whole += 1;
  // a carry from the fraction increments the exponent, from the largest number to infinity
  return sign | Math.min((exponent - minExponent) * 2 ** fractionBits + whole, infinity);
}
