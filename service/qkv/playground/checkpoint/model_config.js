// Reads a model's config.json: what the fields of a layer and the parameters of a run are in it.
//
// The names are those of configurations of transformers.

import { isObject } from "../data/tensors.js";
import {
  hasDifferentLayers,
  knownModel,
  layerSlides,
  layerTurns,
  windowOfNeo,
} from "./known_models.js";

const SCALINGS = {
  linear: ["factor"],
  llama3: ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
  yarn: [
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
  ],
};

/** True if a JSON value is the configuration of a model. */
export function isConfig(value) {
  return isObject(value) && ["model_type", "architectures"].some((name) => name in value);
}

/**
 * Returns what a configuration says about a layer. A field that it does not have is undefined.
 *
 * @param {Object} config
 * @param {number|null} index of the layer, in models whose layers differ
 * @returns {{heads, kvHeads, positions, rope, norm, parameters, notes: string[]}} `positions`:
 *   "none", "rotary" or "alibi", undefined for an unknown type of model; `parameters`: of the
 *   variant
 */
export function readConfig(config, index) {
  const model = isObject(config.text_config) ? config.text_config : config;
  const type = model.model_type ?? config.model_type;
  const notes = [];
  const architectures = [config.architectures ?? []].flat().join(" ");
  const heads = firstNumber(model, "num_attention_heads", "n_head", "num_heads", "n_heads");
  const positions = readPositions(model, type, index);
  if (!positions) notes.push(`positions of ${type ?? "this model"} are not known: set them`);
  if (index === null && hasDifferentLayers(model, type)) {
    notes.push(`layers of ${type} differ, and the name has no number: check positions and window`);
  }
  if (typeof model.clip_qkv === "number") {
    notes.push("clip_qkv is not supported: nothing is clipped");
  }
  return {
    heads,
    kvHeads: readKeyHeads(model),
    positions,
    rope: readRope(model, type, index, heads, notes),
    norm: readNorm(model, type),
    parameters: readParameters({ ...model, architectures }, type, index, heads),
    notes,
  };
}

/** Returns the number of a layer in the names of its tensors; null if there is none. */
export function layerIndex(prefix) {
  const numbers = prefix.split(".").filter((part) => /^\d+$/.test(part));
  return numbers.length ? Number(numbers.at(-1)) : null;
}

function readPositions(model, type, index) {
  if (type === "falcon" && model.alibi === true) return "alibi";
  const positions = knownModel(type)?.positions;
  return positions === "rotary" && !layerTurns(model, type, index) ? "none" : positions;
}

function readNorm(model, type) {
  const eps = firstNumber(model, "rms_norm_eps", "layer_norm_eps");
  const offset = /^gemma[23]?(_text)?$/.test(type) ? { offset: 1 } : {};
  return eps === undefined ? offset : { eps, ...offset };
}

function readKeyHeads(model) {
  if (model.model_type === "falcon" && !model.new_decoder_architecture) {
    return model.multi_query === false ? undefined : 1;
  }
  return firstNumber(model, "num_key_value_heads", "num_kv_heads", "n_kv_heads");
}

function readRope(model, type, index, heads, notes) {
  const known = knownModel(type) ?? {};
  const isLocal = known.localBase !== undefined && layerSlides(model, type, index) === true;
  const kinds = model.rope_parameters;
  const kindOfLayer = model.layer_types?.[index] ?? "full_attention";
  const perLayer = kinds?.[isLocal ? "sliding_attention" : kindOfLayer];
  // before transformers 5, the scaling was that of the layers without a window
  const own = perLayer ?? kinds ?? (isLocal ? null : model.rope_scaling);
  const scaling = isObject(own) ? own : {};
  const local = { rope_theta: model.rope_local_base_freq ?? known.localBase };
  const every = { ...model, ...(isLocal ? local : {}), ...scaling };
  const base = firstNumber(every, "rope_theta", "rotary_emb_base") ?? known.base;
  const share =
    firstNumber(every, "partial_rotary_factor", "rotary_pct", "rotary_percentage") ?? known.share;
  const width = model.head_dim ?? model.hidden_size / heads;
  const dims = share < 1 ? 2 * Math.floor((share * width) / 2) : (model.rotary_dim ?? known.dims);
  const kind = scaling.rope_type ?? scaling.type ?? "default";
  const fields = known.order ? { order: known.order } : {};
  if (base) fields.base = base;
  if (Number.isInteger(dims) && dims > 0) fields.dims = dims;
  if (Object.hasOwn(SCALINGS, kind)) {
    const named = SCALINGS[kind].filter((name) => typeof scaling[name] === "number");
    fields.scaling = { rope_type: kind };
    for (const name of named) fields.scaling[name] = scaling[name];
    if (kind === "yarn" && typeof scaling.truncate === "boolean") {
      fields.scaling.truncate = scaling.truncate;
    }
    if (kind === "yarn" && !fields.scaling.original_max_position_embeddings) {
      fields.scaling.original_max_position_embeddings = model.max_position_embeddings;
    }
  } else if (kind !== "default") {
    notes.push(`rope scaling ${kind} is not supported, so positions are not scaled`);
  }
  return fields;
}

function readParameters(model, type, index, heads) {
  const parameters = {};
  const isDecoder = model.is_decoder || knownModel(type)?.causal;
  if (isDecoder || /CausalLM|LMHead/.test(model.architectures)) parameters.causal = true;
  const length = type === "gpt_neo" ? windowOfNeo(model, index) : model.sliding_window;
  if (Number.isInteger(length) && layerSlides(model, type, index)) {
    parameters.window = [length - 1, null];
  }
  const softcap = firstNumber(model, "attn_logit_softcapping");
  if (softcap) parameters.softcap = softcap;
  const scale = readScale(model, type, index, heads);
  if (scale) parameters.scale = scale;
  return parameters;
}

/** Returns the scale of the scores; undefined if it is 1 / sqrt(D). */
function readScale(model, type, index, heads) {
  if (type === "gpt_neo") return 1;
  const scalar = firstNumber(model, "query_pre_attn_scalar");
  if (scalar) return scalar ** -0.5;
  if (!["gpt2", "gpt_bigcode"].includes(type)) return firstNumber(model, "attention_multiplier");
  const isByLayer = model.scale_attn_by_inverse_layer_idx === true && type === "gpt2";
  if (model.scale_attn_weights !== false && !isByLayer) return undefined;
  const width = (model.n_embd ?? model.hidden_size) / heads;
  const scale = model.scale_attn_weights === false ? 1 : width ** -0.5;
  return isByLayer ? scale / (index + 1) : scale;
}

function firstNumber(object, ...names) {
  return names.map((name) => object[name]).find((value) => typeof value === "number");
}
