// Builds the layer of a request from the fields of the page.

import { OTHER_HEADS } from "./layer_fields.js";

/**
 * Returns the fields of a layer without its tensors.
 *
 * @param {Object} found the layer, as POST /v1/layers lists it
 * @param {Object} layout the chosen one of its layouts
 * @param {Object} fields from `createLayerFields`
 * @param {Object|null} config from `readConfig`
 * @throws {Error} a number is missing; `pointer` names its field
 */
export function buildLayer(found, layout, fields, config) {
  const [heads, keyHeads] =
    fields.heads.value === OTHER_HEADS
      ? [readCount(fields.queryHeads, "Query heads"), readCount(fields.keyHeads, "Key heads")]
      : fields.heads.value.split("/").map(Number);
  const layer = { layout: layout.layout, heads };
  if (found.prefix) layer.prefix = found.prefix;
  if (keyHeads !== heads) layer.kv_heads = keyHeads;
  if (fields.positions.value === "rotary") layer.rope = buildRope(fields, layout, config);
  if (fields.positions.value === "alibi") layer.alibi = layout.alibi || true;
  const norm = config?.norm ?? {};
  if ("q_norm.weight" in found.shapes && Object.keys(norm).length) layer.qk_norm = norm;
  return layer;
}

function buildRope(fields, layout, config) {
  const base = fields.base.valueAsNumber;
  if (!(base > 1)) throw fieldError("Base is missing: expected a number above 1", "/layer/rope");
  const rope = { base };
  if (fields.order.value !== layout.rotary_order) rope.order = fields.order.value;
  if (fields.dims.value || fields.dims.validity.badInput) {
    const dims = fields.dims.valueAsNumber;
    if (!Number.isInteger(dims) || dims < 2 || dims % 2) {
      throw fieldError("Channels is invalid: expected an even number", "/layer/rope");
    }
    rope.dims = dims;
  }
  if (config?.rope.scaling) rope.scaling = config.rope.scaling;
  return rope;
}

function readCount(input, label) {
  const count = input.valueAsNumber;
  if (Number.isInteger(count) && count > 0) return count;
  throw fieldError(`${label} is missing: expected a whole number above 0`, "/layer/heads");
}

function fieldError(message, pointer) {
  return Object.assign(new Error(message), { pointer });
}
