// Several heads: two maps over the same words, and how a layer joins what they found.

import { WORDS } from "../inputs/six_words.js";

// head 0 compares the first two numbers of the words, head 1 the third
const LAYER = {
  layout: "v1",
  heads: 2,
  tensors: {
    W_query: [
      [4, 0, 0, 0],
      [0, 4, 0, 0],
      [0, 0, 4, 0],
    ],
    W_key: [
      [1, 0, 0, 0],
      [0, 1, 0, 0],
      [0, 0, 1, 0],
    ],
    W_value: [
      [1, 0, 0, 1],
      [0, 1, 0, 0],
      [0, 0, 1, 0],
    ],
  },
};
const TWO_HEADS = {
  variant: "softmax",
  tensors: JSON.stringify([{ name: "words", role: "x", tensor: WORDS }]),
  layer: JSON.stringify(LAYER),
  labels: "Your journey starts with one step",
  row: 1,
};

export const heads = {
  id: "heads",
  title: "Several heads",
  purpose: "Two maps over the same words, and how a layer joins what they found.",
  stops: [
    {
      state: { example: "induction", row: 10 },
      section: "weights",
      look: "#heads",
      text: "One map answers one question about each word, so a layer has several heads, each with queries, keys and values of its own; here are four. The first asks what followed the same word before, and the second “cat” takes 0.9651 from “saw”.",
    },
    {
      state: { example: "induction", row: 10, head: 1 },
      section: "weights",
      look: "#row table",
      text: "The second head asks for the word before, whatever it is, and “cat” takes 0.9664 from “the” on its left. No single row could say both, because its weights have to add up to 1: the more one word gets, the less is left for the others.",
    },
    {
      state: TWO_HEADS,
      section: "weights",
      look: "#row table",
      text: "A layer makes all heads at once: its matrices give each word four numbers, of which the first head takes the first two and the second head the others. This first head compares two of the numbers in the list of a word, and “journey” takes 0.3216 from itself and 0.3158 from “starts”.",
    },
    {
      state: { ...TWO_HEADS, head: 1 },
      section: "weights",
      look: "#row table",
      text: "The second head compares the third number alone, which is largest in “Your”. So every word takes most from that one, “journey” too: 0.2951, and from itself only 0.1921.",
    },
    {
      state: TWO_HEADS,
      section: "steps",
      look: "[data-step=output]",
      text: "Each head mixes values of its own, two numbers for each word here, and leaves two numbers for “journey”: 0.479 and 0.734. The heads do not see each other, so they can be computed side by side, which is what makes many of them cheap.",
    },
    {
      state: { ...TWO_HEADS, head: 1 },
      section: "output",
      look: "#output .surface",
      text: "The layer then puts the results beside each other: a row of this output has four numbers, the first two from the first head and the others from the second. A model multiplies them by one more matrix, and so every number that goes on is a mixture of what all its heads have found.",
    },
  ],
};
