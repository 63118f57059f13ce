// The letters of axes, as the catalogue of variants has them.

const HEADS = ["H", "G", "J", "V", "T"];

/** True for the letter of an axis of heads. */
export const isHeads = (letter) => HEADS.includes(letter);

/** Returns the letters of the axes that a run omits: its inputs and its response lack them. */
export function omittedLetters({ request: { variant, body }, weights }) {
  const letters = variant.outputs.weights.shape;
  const missing = letters.length - weights.tensor.shape.length;
  const heads = letters.filter(isHeads).length;
  if (missing === 0) return new Set();
  if (missing > heads) return new Set(["B", ...HEADS]);
  return new Set(heads === 0 || body.layer?.heads ? ["B"] : HEADS);
}
