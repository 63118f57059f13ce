// The model types whose positions, order of rotary channels, scale and windows are known.
//
// Source: their configuration and modeling files in transformers 5.23. Names of fields are those of
// config.json; `base` and `share` are the values of a configuration that leaves them out.

const NONE = { positions: "none" };
const ROTARY = { positions: "rotary", causal: true };
const INTERLEAVED = { ...ROTARY, order: "interleaved" };

/** Slides in all layers but each n-th. */
const allButEach = (interval) => (model, index) =>
  (index + 1) % (model.sliding_window_pattern ?? interval) !== 0;
const slidesLate = (model, index) => index >= (model.max_window_layers ?? 28);
const slidesEarly = (model, index) => index % 2 === 0 && !slidesLate(model, index);

const KNOWN = {
  ...sameFor("albert bert camembert deit distilbert electra roberta vit xlm-roberta", NONE),
  ...sameFor("gpt2 gpt_bigcode gpt_neo opt", { ...NONE, causal: true }),
  bloom: { positions: "alibi", causal: true },
  ...sameFor("falcon gemma granite llama mistral olmo olmo2 phi3 starcoder2", ROTARY),
  mixtral: { ...ROTARY, base: 1e6 },
  phi: { ...ROTARY, share: 0.5 },
  ...sameFor("gpt_neox stablelm", { ...ROTARY, share: 0.25 }),
  ...sameFor("qwen2 qwen3", { ...ROTARY, isWindowOptional: true, slides: slidesLate }),
  qwen2_moe: { ...ROTARY, isWindowOptional: true, slides: slidesEarly },
  qwen3_moe: { ...ROTARY, isWindowOptional: true },
  gemma2: { ...ROTARY, slides: allButEach(2) },
  ...sameFor("gemma3 gemma3_text", {
    ...ROTARY,
    base: 1e6,
    localBase: 1e4,
    slides: allButEach(6),
  }),
  gpt_oss: { ...ROTARY, base: 150000, slides: allButEach(2) },
  smollm3: {
    ...ROTARY,
    base: 2e6,
    isWindowOptional: true,
    slides: (model, index) => !turnsInSmollm(model, index),
    turns: turnsInSmollm,
  },
  cohere: { ...INTERLEAVED, base: 500000 },
  cohere2: {
    ...INTERLEAVED,
    slides: allButEach(4),
    turns: (model, index) => layerSlides(model, "cohere2", index), // the other layers do not
  },
  ...sameFor("glm glm4", { ...INTERLEAVED, share: 0.5 }),
  ...sameFor("ernie4_5 ernie4_5_moe", { ...INTERLEAVED, base: 500000 }),
  gptj: { ...INTERLEAVED, dims: 64 },
};

/** Returns what is known of a model type; null if nothing is. */
export function knownModel(type) {
  return Object.hasOwn(KNOWN, type) ? KNOWN[type] : null;
}

/** Returns true if the configuration's layers differ, so that a layer needs its number. */
export function hasDifferentLayers(model, type) {
  const known = knownModel(type);
  if (known?.turns || model.layer_types || type === "gpt_neo") return true;
  return Boolean(known?.slides) && (!known.isWindowOptional || model.use_sliding_window === true);
}

/** Returns true if a layer has a sliding window; undefined if the configuration does not tell. */
export function layerSlides(model, type, index) {
  const known = knownModel(type);
  if (known?.isWindowOptional && model.use_sliding_window !== true) return false;
  if (model.use_sliding_window === false) return false;
  const kind = model.layer_types?.[index];
  if (kind) return kind === "sliding_attention";
  if (known?.slides) return index === null ? undefined : known.slides(model, index);
  return model.layer_types ? undefined : true;
}

/** Returns true if a layer of a rotary model has a rotary embedding. */
export function layerTurns(model, type, index) {
  const turns = knownModel(type)?.turns;
  return !turns || index === null || turns(model, index);
}

/** Returns the window of a layer of GPT-Neo, whose configuration has its own fields. */
export function windowOfNeo(model, index) {
  const types = model.attention_types ?? [[["global", "local"], 12]];
  const expand = ([kinds, times]) => Array(times).fill(kinds).flat();
  const layers = model.attention_layers ?? types.flatMap(expand);
  return layers[index] === "local" ? (model.window_size ?? 256) : null;
}

function turnsInSmollm(model, index) {
  const listed = model.no_rope_layers?.[index]; // 1: the layer has the embedding
  if (listed !== undefined) return Boolean(listed);
  return (index + 1) % (model.no_rope_layer_interval ?? 4) !== 0;
}

function sameFor(types, known) {
  return Object.fromEntries(types.split(" ").map((type) => [type, known]));
}
