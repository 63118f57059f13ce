// Hidden states for a layer of a checkpoint: random ones, and uploaded ones in the layer's dtype.

import { fromNumbers, toNumbers } from "../data/dtypes.js";
import { createNormal } from "../inputs/examples.js";

const SEED = 20;
const FLOATING = ["float64", "float32", "float16", "bfloat16"];

/** Creates the entry of random hidden states for the page's list of tensors: (rows, width). */
export function createHiddenStates(rows, width, dtype) {
  const random = createNormal(SEED);
  const numbers = Float64Array.from({ length: rows * width }, random);
  const tensor = fromNumbers(numbers, [rows, width], dtype);
  return { name: "x", role: "x", tensor, isRandom: true };
}

const castTensors = new WeakMap();

/** Rounds a floating tensor to a dtype; returns others unchanged. */
export function castTo(tensor, dtype) {
  if (!FLOATING.includes(tensor.dtype)) return tensor;
  if (tensor.dtype === dtype) return tensor;
  const known = castTensors.get(tensor);
  if (known?.dtype === dtype) return known;
  const cast = fromNumbers(toNumbers(tensor), tensor.shape, dtype);
  castTensors.set(tensor, cast);
  return cast;
}
