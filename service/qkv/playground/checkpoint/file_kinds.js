// Tells the files of a checkpoint from files of tensors, and reads config.json.

import { isSafetensors } from "../data/safetensors.js";
import { MAX_FILE_BYTES } from "../data/uploads.js";
import { parseJson } from "../data/tensors.js";
import { formatCount } from "../dom.js";
import { readHeaders } from "./checkpoint_files.js";
import { isConfig } from "./model_config.js";

const CONFIG_BYTES = 2 ** 20; // larger JSON is no configuration
const MODULE = /\.(weight|bias)$|_proj_weight$/;

/**
 * True if a file is part of a checkpoint, and not of tensors for a run.
 *
 * @param {File} file
 * @param {boolean} isOpen a checkpoint is open, so that config.json belongs to it
 */
export async function isOfModel(file, isOpen) {
  if (/^config.*\.json$/i.test(file.name) && file.size < CONFIG_BYTES) {
    try {
      return isOpen && isConfig(parseJson(await file.text()));
    } catch {
      return false;
    }
  }
  const head = new Uint8Array(
    await file
      .slice(0, 9)
      .arrayBuffer()
      .catch(() => new ArrayBuffer()),
  );
  if (!isSafetensors(head)) return false;
  if (file.size > MAX_FILE_BYTES) return true;
  try {
    return [...(await readHeaders([file])).keys()].some((name) => MODULE.test(name));
  } catch {
    return false; // the upload says why
  }
}

/** Returns the JSON of a config.json. */
export async function readConfigFile(file) {
  try {
    if (file.size > CONFIG_BYTES) throw new Error("the file is too large for a configuration");
    const value = parseJson(await file.text());
    if (isConfig(value)) return value;
    throw new Error("this is no configuration of a model: it has no model_type or architectures");
  } catch (error) {
    throw new Error(`${file.name}: ${error.message}`);
  }
}

/** Returns the message for files without attention layers. */
export function noLayersMessage(names) {
  const first = names.slice(0, 3).map((name) => JSON.stringify(name));
  return (
    `no attention layers found among ${names.length} tensors, such as ${first.join(", ")}: ` +
    "expected names such as q_proj.weight, c_attn.weight or in_proj_weight"
  );
}

/** Returns the message for a layer that the service would refuse. */
export function tooLargeMessage(bytes, limit) {
  return (
    `this layer takes ${formatCount(bytes, "B")}, and the service accepts ` +
    `${formatCount(limit, "B")}: start it with a larger QKV_MAX_BODY_BYTES`
  );
}
