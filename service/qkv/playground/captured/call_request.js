// Compares variants on one captured call: its request, and smaller ones if that is too large.

import { post } from "../api.js";
import { readHeads } from "./captured_file.js";

/** The variants that are compared unless the user chooses others. */
export const DEFAULT_VARIANTS = ["linear", "taylor", "efficient", "sigmoid"];

export const ANCHOR = "softmax";

const REQUIRED = ["query", "key", "value"];
const TOO_LARGE = 413;

/** Returns the variants of the catalogue that a captured call can be compared with. */
export function comparedVariants(catalogue) {
  return [...catalogue.values()].filter(({ variant, inputs }) => {
    const needed = Object.entries(inputs).filter(([, { optional }]) => !optional);
    const isComplete = REQUIRED.every((name) => name in inputs);
    return variant !== ANCHOR && isComplete && needed.every(([name]) => REQUIRED.includes(name));
  });
}

/** Returns the reason why a variant cannot see what a call sees; null if it can. */
export function problemOf({ variant, inputs, parameters: { properties } }, call) {
  const { causal, query_offset: offset, window } = call.parameters;
  if (call.tensors.mask && !("mask" in inputs)) return `${variant} takes no mask`;
  if (causal && !("causal" in properties)) return `${variant} is never causal`;
  if (offset && !("query_offset" in properties)) return `${variant} takes no query_offset`;
  if (window && !("window" in properties)) return `${variant} takes no window`;
  return null;
}

/**
 * Compares variants with softmax on a call.
 *
 * @param {Object} call
 * @param {Object[]} variants entries of the catalogue that can see what the call sees
 * @param {AbortSignal} signal
 * @returns {Promise<Array<{heads: number[], queries: number, result: Object}>>} for each request the
 *   numbers of its heads, as often as there are sequences, and the response
 */
export async function compareCall(call, variants, signal, first = 0, last = call.heads.length) {
  const tensors = await readHeads(call, first, last);
  if (signal.aborted) return [];
  const [items, , length] = tensors.query.shape;
  const inputs = asOneSequence(tensors) ?? tensors;
  const isOne = inputs !== tensors;
  try {
    const { result } = await post("/v1/compare", buildBody(call, variants, inputs), signal);
    const own = call.heads.slice(first, last);
    const heads = isOne ? Array.from({ length: items }, () => own).flat() : own;
    return [{ heads, queries: isOne ? length : items * length, result }];
  } catch (problem) {
    if (problem.status !== TOO_LARGE || last - first === 1) throw problem;
    const middle = middleHead(call, first, last);
    return [
      ...(await compareCall(call, variants, signal, first, middle)),
      ...(await compareCall(call, variants, signal, middle, last)),
    ];
  }
}

function buildBody({ parameters }, variants, inputs) {
  return {
    inputs,
    anchor: { variant: ANCHOR, parameters },
    variants: variants.map(({ variant, parameters: { properties } }) => {
      const own = Object.entries(parameters).filter(([name]) => name in properties);
      return { variant, parameters: Object.fromEntries(own) };
    }),
    repeats: 1,
    per_head: true,
  };
}

/** Returns the place that halves some heads; heads that share a key head stay together if possible. */
function middleHead({ heads, tensors }, first, last) {
  const group = heads.length / tensors.key.shape[1];
  const size = last - first;
  return first + (size > group ? Math.floor(size / group / 2) * group : Math.floor(size / 2));
}

/**
 * Returns the tensors with the sequences of a batch as further heads of one sequence: then each has
 * figures of its own, without its neighbours. Null if the mask has no such form.
 */
function asOneSequence({ query, key, value, sinks, mask }) {
  const [items, heads] = query.shape;
  const join = ({ shape, ...rest }) => ({
    ...rest,
    shape: [1, items * shape[1], ...shape.slice(2)],
  });
  const found = { query: join(query), key: join(key), value: join(value) };
  if (sinks) {
    const data = new Uint8Array(items * sinks.data.length);
    for (let item = 0; item < items; item += 1) data.set(sinks.data, item * sinks.data.length);
    found.sinks = { ...sinks, shape: [items * heads], data };
  }
  if (!mask) return found;
  const [maskItems, maskHeads] = [mask.shape.at(-4) ?? 1, mask.shape.at(-3) ?? 1];
  if (maskItems === items && maskHeads === heads) return { ...found, mask: join(mask) };
  return maskItems === 1 && maskHeads === 1 ? { ...found, mask } : null;
}
