// Positions: attention has no order, and what rotations and distances do to a score.

import { WORDS } from "../inputs/six_words.js";

const SAME = "no no no no no no";

const backwards = () =>
  JSON.stringify([{ name: "words", role: "query, key, value", tensor: WORDS.toReversed() }]);

/** A layer that passes words on as they are, with rotary positions. */
const rotated = (word, base) => {
  const rows = word.map((_, row) => word.map((_, col) => Number(row === col)));
  const tensors = { W_query: rows, W_key: rows, W_value: rows };
  return {
    variant: "softmax",
    "parameters.scale": 1,
    tensors: JSON.stringify([{ name: "words", role: "x", tensor: WORDS.map(() => word) }]),
    layer: JSON.stringify({ layout: "v1", rope: { base }, tensors }),
    labels: SAME,
  };
};

const DISTANCES = JSON.stringify([
  { name: "words", role: "query, key, value", tensor: WORDS.map(() => [1, 0]) },
  { name: "slopes", role: "alibi_slopes", tensor: [0.5] },
]);

export const positions = {
  id: "positions",
  title: "Positions",
  purpose: "Attention has no order; what rotations and distances do to a score.",
  stops: [
    {
      state: {
        variant: "softmax",
        "parameters.scale": 1,
        tensors: backwards(),
        labels: "step one with starts journey Your",
        row: 4,
      },
      section: "weights",
      look: "#row table",
      text: "This is the sentence backwards, and “journey” still takes 0.2379 from itself and 0.2333 from “starts”: attention sees a set of words, not their order. “dog bites man” and “man bites dog” would be the same to it, so models give it the positions as numbers.",
    },
    {
      state: { ...rotated([1, 0], 10000), row: 0 },
      section: "steps",
      look: "[data-step=key]",
      text: "Most models turn each query and each key by an angle that grows with the position, which is called a rotary embedding. Here all six words are the same, 1 and 0, but each is turned by 1 radian more than the one before: the second key is 0.540 and 0.841, the cosine and the sine of 1.",
    },
    {
      state: { ...rotated([1, 0], 10000), row: 0 },
      section: "steps",
      look: "[data-step=scores]",
      text: "The score of two turned words is the cosine of the angle between them, and it falls with their distance at first: 1.00 for the word itself, 0.540 for the next one, −0.416 two words on. Without the rotation all six scores would be equal.",
    },
    {
      state: { ...rotated([1, 0], 10000), row: 3 },
      section: "steps",
      look: "[data-step=scores]",
      text: "Both query and key turn, so only the distance counts and not the place: three words on, the query has a score of 1.00 with itself, and 0.540 with the words on both of its sides. What a model learns about neighbours therefore holds everywhere in a text.",
    },
    {
      state: { ...rotated([1, 1, 0, 0], 100), row: 0 },
      section: "steps",
      look: "[data-step=scores]",
      text: "One angle soon comes around again, so models turn many pairs of numbers, each pair more slowly than the last: this word has two, of which one turns by 1 radian and the other by a tenth of it. Their scores add up, to 2.00 for the word itself and 1.54 for the next one, and the slow pair still tells far from near when the quick one cannot.",
    },
    {
      state: {
        variant: "softmax",
        "parameters.causal": true,
        "parameters.scale": 1,
        tensors: DISTANCES,
        labels: SAME,
        row: 5,
      },
      section: "steps",
      look: "[data-step=biased]",
      text: "Other models turn nothing and subtract from each score a number that grows with the distance, which is called ALiBi. All scores of the last word were 1.00 here, and each step back takes 0.500 away: 1.00 stays for itself, 0.500 for the word before and −1.50 for the first.",
    },
  ],
};
