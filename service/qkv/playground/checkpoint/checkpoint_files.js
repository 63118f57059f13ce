// Reads the headers of safetensors files, and later the bytes of single tensors. A file is never
// read whole.

import {
  checkTensorCount,
  dtypeOf,
  headerLength,
  LENGTH_BYTES,
  parseHeader,
} from "../data/safetensors.js";

const PICKLE = /\.(pt|pth|bin|ckpt)$/i;

/**
 * Reads the headers of the files of a checkpoint.
 *
 * @param {File[]} files one, or several that share a model's tensors
 * @returns {Promise<Map<string, {file, dtype, shape, start, end}>>} the tensors by name; `dtype`:
 *   as in the file; `start`, `end`: the place of its bytes in the file
 * @throws {Error} a message for the user
 */
export async function readHeaders(files) {
  const tensors = new Map();
  for (const file of files) {
    try {
      for (const [name, tensor] of (await readHeader(file)).tensors) {
        if (tensors.has(name)) throw new Error(`another file has ${JSON.stringify(name)} too`);
        tensors.set(name, { ...tensor, file });
      }
      checkTensorCount(tensors.size);
    } catch (error) {
      throw new Error(`${file.name}: ${error.message}`);
    }
  }
  return tensors;
}

/**
 * Reads the bytes of tensors.
 *
 * @param {Map} table from `readHeaders`
 * @param {string[]} names
 * @returns {Promise<Object>} tensors by name, with the name of the file of each
 * @throws {Error} a message for the user
 */
export async function readTensors(table, names) {
  const entries = await Promise.all(
    names.map(async (name) => {
      const { file, dtype, shape, start, end } = table.get(name);
      checkDtype(name, dtype);
      const data = await readRange(file, start, end);
      return [name, { dtype: dtypeOf(dtype), shape, data, file: file.name }];
    }),
  );
  return Object.fromEntries(entries);
}

/**
 * Reads bytes of a file whose header is known.
 *
 * @returns {Promise<Uint8Array>}
 * @throws {Error} a message for the user
 */
export async function readRange(file, start, end) {
  try {
    return new Uint8Array(await file.slice(start, end).arrayBuffer());
  } catch {
    throw new Error(`${file.name} has changed or moved: choose it again`);
  }
}

/** Returns the bytes of some tensors of a table. */
export function tensorBytes(table, names) {
  return names.reduce((sum, name) => sum + table.get(name).end - table.get(name).start, 0);
}

function checkDtype(name, dtype) {
  if (["float64", "float32", "float16", "bfloat16"].includes(dtypeOf(dtype))) return;
  throw new Error(
    `${name} is ${dtype}, a quantized dtype: this page runs F64, F32, F16 and BF16. ` +
      "Choose the checkpoint of the model that is not quantized",
  );
}

/**
 * Reads the header of a file.
 *
 * @param {File} file
 * @returns {Promise<{tensors: Array, metadata: Object}>} `tensors`: pairs of a name and {dtype,
 *   shape, start, end}; `metadata`: texts by name
 * @throws {Error} a message for the user
 */
export async function readHeader(file) {
  const head = await readBytes(file, 0, LENGTH_BYTES + 1);
  refuseOtherFormats(file, head);
  const start = LENGTH_BYTES + headerLength(head, file.size);
  const { tensors, metadata } = parseHeader(
    await readBytes(file, LENGTH_BYTES, start),
    file.size - start,
  );
  const inFile = ([name, entry]) => [
    name,
    { ...entry, start: start + entry.start, end: start + entry.end },
  ];
  return { tensors: tensors.map(inFile), metadata };
}

async function readBytes(file, start, end) {
  try {
    return new Uint8Array(await file.slice(start, end).arrayBuffer());
  } catch {
    throw new Error("the file cannot be read"); // such as a folder that was dropped
  }
}

/** Returns the command that makes a safetensors file of a pickle, as cli/torch_files.py has it. */
function conversionCommand(name) {
  const quote = (text) => `'${text.replace(/[\\']/g, "\\$&")}'`;
  const target = `${name.replace(PICKLE, "")}.safetensors`;
  const program =
    `import torch, safetensors.torch as s; d = torch.load(${quote(name)}, weights_only=True, ` +
    "map_location='cpu'); d = d.get('state_dict', d.get('model', d)); s.save_file(" +
    `{k: v.clone().contiguous() for k, v in d.items() if torch.is_tensor(v)}, ${quote(target)})`;
  // double quotes also work on Windows, but need plain names
  const isPlain = !/["$`\\!]/.test(program);
  return `python -c ${isPlain ? `"${program}"` : `'${program.replaceAll("'", `'"'"'`)}'`}`;
}

/** Returns the message for a file of torch.save, with the command that converts it. */
export const pickleMessage = (name) =>
  "this is a pickle, which can run any code. Make a safetensors file of it: " +
  conversionCommand(name);

/** Throws for the files that people choose instead, with the way from them. */
function refuseOtherFormats(file, head) {
  if (PICKLE.test(file.name) || (head[0] === 0x50 && head[1] === 0x4b)) {
    throw new Error(pickleMessage(file.name));
  }
  if (/\.index\.json$/.test(file.name)) {
    throw new Error("this is the index of a checkpoint: choose the .safetensors files beside it");
  }
  if (head.length <= LENGTH_BYTES || head[LENGTH_BYTES] !== 0x7b) {
    throw new Error("this is not a safetensors file: its first bytes are different");
  }
}
