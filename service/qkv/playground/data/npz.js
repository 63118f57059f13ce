// Reads numpy's .npz: a ZIP archive with a .npy for each array, stored or deflated.

import { pickleMessage } from "../checkpoint/checkpoint_files.js";
import { parseNpy } from "./npy.js";

const END = 0x06054b50; // signature of the end of the directory
const ENTRY = 0x02014b50; // signature of an entry of the directory

/** True if the bytes begin as a ZIP archive does. */
export const isZip = (bytes) => bytes[0] === 0x50 && bytes[1] === 0x4b;

/**
 * Reads the arrays of an .npz.
 *
 * @param {Uint8Array} bytes of the whole file
 * @param {{maxBytes: number, fileName: string}} options `maxBytes`: of all arrays
 * @returns {Promise<Object>} tensors by name
 * @throws {Error} a message for the user
 */
export async function parseNpz(bytes, { maxBytes, fileName }) {
  const entries = readDirectory(bytes);
  if (entries.some(({ name }) => /(^|\/)data\.pkl$/.test(name))) {
    throw new Error(pickleMessage(fileName));
  }
  const others = entries.filter(({ name }) => !name.endsWith(".npy"));
  if (others.length || !entries.length) {
    const got = others.length ? others[0].name.slice(0, 60) : "none";
    throw new Error(`the archive has other files: got ${got}, expected .npy`);
  }
  const tensors = {};
  let rest = maxBytes;
  for (const entry of entries) {
    const data = await unpack(bytes, entry, rest);
    rest -= data.length;
    tensors[entry.name.slice(0, -".npy".length)] = parseNpy(data);
  }
  return tensors;
}

/** Reads the directory at the end of an archive (PKWARE APPNOTE 4.3.12, without ZIP64). */
function readDirectory(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let end = bytes.length - 22;
  while (end >= 0 && view.getUint32(end, true) !== END) end -= 1;
  if (end < 0) throw new Error("this archive is cut off: it has no directory");
  const entries = [];
  let at = view.getUint32(end + 16, true);
  for (let left = view.getUint16(end + 10, true); left; left -= 1) {
    if (at + 46 > end || view.getUint32(at, true) !== ENTRY) {
      throw new Error("the directory of this archive is damaged");
    }
    const nameLength = view.getUint16(at + 28, true);
    entries.push({
      method: view.getUint16(at + 10, true),
      packedSize: view.getUint32(at + 20, true),
      start: view.getUint32(at + 42, true),
      name: new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + nameLength)),
    });
    at += 46 + nameLength + view.getUint16(at + 30, true) + view.getUint16(at + 32, true);
  }
  return entries;
}

async function unpack(bytes, { name, method, packedSize, start }, maxBytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (start + 30 > bytes.length) throw new Error(`${name} is cut off`);
  const from = start + 30 + view.getUint16(start + 26, true) + view.getUint16(start + 28, true);
  const packed = bytes.subarray(from, from + packedSize);
  if (packed.length < packedSize) throw new Error(`${name} is cut off`);
  if (method === 0) return packed;
  if (method !== 8) throw new Error(`${name} has compression ${method}, expected none or deflate`);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const reader = stream.getReader();
  const parts = [];
  let size = 0;
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) {
      size += next.value.length;
      if (size > maxBytes) break;
      parts.push(next.value);
    }
  } catch {
    throw new Error(`${name} is damaged: it cannot be decompressed`);
  }
  if (size > maxBytes) {
    await reader.cancel();
    throw new Error(`arrays too large: the limit is ${maxBytes} bytes`);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}
