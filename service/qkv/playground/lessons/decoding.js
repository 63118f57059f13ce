// State and decoding: what has to be kept of a text to compute its next word.

import { WORDS } from "../inputs/six_words.js";

const HALF = Math.log(0.5);
const FORGETTING = [
  { name: "words", role: "query, key, value", tensor: WORDS },
  { name: "log_decay", role: "log_decay", tensor: WORDS.map(() => HALF) },
];
const SIZES = { mode: "decode", heads: 1, width: 64, repeats: 9 };

export const decoding = {
  id: "decoding",
  title: "State and decoding",
  purpose: "What a model keeps of a text to write the next word.",
  stops: [
    {
      state: { example: "words", "parameters.causal": true, "parameters.scale": 1, row: 5 },
      section: "weights",
      look: "#map .surface",
      text: "A model writes one word at a time, and each new word adds one row at the bottom of the map: “step” came last and takes 0.2184 from “journey”. The rows above never change, because they cannot see the new word, so only the last row has to be computed.",
    },
    {
      state: { example: "words", "parameters.causal": true, "parameters.scale": 1 },
      section: "length",
      look: "#sweep details",
      measure: { variants: ["softmax"], longest: 2048, ...SIZES },
      text: "For its new row, softmax needs the keys and values of all words before, and models keep them in a cache, which saves computing everything again. The cache grows with the text, as the table says: 33,280 bytes after 64 words, 1,049,088 bytes after 2,048, for a single head.",
    },
    {
      state: { example: "words", variant: "mean", row: 5 },
      section: "weights",
      look: "#row table",
      text: "A running average needs no cache: keep the sum of all words and their number, add the next word, and divide. For “step” that is a sixth of each, 0.1667, and what is kept, the state, has the same size after any number of words.",
    },
    {
      state: {
        example: "words",
        variant: "linear",
        "parameters.causal": true,
        "parameters.state": '"compact"',
      },
      section: "length",
      look: "#sweep .chart, #sweep details",
      measure: { variants: ["softmax", "linear"], longest: 4096, ...SIZES },
      text: "Linear attention has such a state as well, the table of keys times values, to which each word adds its own: 33,344 bytes after any number of words, while the cache has 33,280 after 64 and 2,097,664 after 4,096. Its line in the chart is as flat; that of the cache begins lower, because a call with a state has more to do, but climbs, so the state is faster only in very long texts.",
    },
    {
      state: {
        variant: "gated",
        "parameters.rule": '"gated"',
        "parameters.scale": 1,
        tensors: JSON.stringify(FORGETTING),
        labels: "Your journey starts with one step",
        row: 5,
      },
      section: "weights",
      look: "#row table",
      text: "A state of fixed size cannot hold every word well, so newer models let it fade: here each new word first halves all that the state holds. These weights are not divided by their sum and need not add up to 1: “step” has 0.9450 for itself and only 0.0197 for “Your”, which is five words back and nearly forgotten.",
    },
  ],
};
