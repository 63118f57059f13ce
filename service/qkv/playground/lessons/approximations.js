// Linformer and Taylor: two ways to make softmax cheaper, and how close each comes.

const INDUCTION = {
  example: "induction",
  "parameters.causal": true,
  "parameters.scale": 1,
  row: 10,
};

export const approximations = {
  id: "approximations",
  title: "Linformer and Taylor",
  purpose: "Two ways to make softmax cheaper, and what each one changes.",
  stops: [
    {
      state: { example: "words", variant: "taylor", row: 1 },
      section: "weights",
      look: "#row table",
      text: "For a small x, the exponential of x is nearly 1 + x, and Taylor attention uses this sum instead; it brings all lists to length 1 first, so that x is at most 1. “journey” takes 0.1757 from itself and 0.1501 from “one”: the most and the least go to the same words as with softmax, but the row is much flatter.",
    },
    {
      state: { example: "words", difference: "taylor", row: 1 },
      section: "compare",
      look: "#difference .beside",
      text: "For these six words the two are close: on average, 0.084 of the weight of a row differs. The largest difference, 0.120, is in the row of “journey”, where softmax prefers the long lists of “journey” and “starts”, and Taylor attention cannot see how long a list is.",
    },
    {
      state: { ...INDUCTION, variant: "taylor" },
      section: "weights",
      look: "#row table",
      text: "1 + x is never more than 2, so a word can get at most twice the weight of a word that has nothing to do with the query. Here “saw” is the word to find, and it gets 0.1588 while most others get about half of that: Taylor attention can prefer, but not choose.",
    },
    {
      state: {
        example: "words",
        variant: "linformer",
        "parameters.rank": 3,
        "parameters.scale": 1,
        row: 1,
      },
      section: "weights",
      look: "#row",
      text: "Linformer keeps the exponential and shortens the text instead: it mixes all keys into a few, here 3, and all values too, so that each query compares itself with 3 mixtures. A trained model has learned good mixtures; these are random, so they add and subtract words by chance, and the orange weights are negative.",
    },
    {
      state: { example: "words", variant: "linformer", "parameters.rank": 16 },
      section: "length",
      look: "#sweep .chart",
      measure: {
        variants: ["softmax", "linformer", "taylor"],
        mode: "whole",
        longest: 2048,
        heads: 1,
        width: 64,
        repeats: 9,
      },
      text: "Both save time in long texts: Taylor attention because it is a product like linear attention, Linformer because each query meets a fixed number of mixtures, here 16. In short texts softmax is as fast or faster, as the left side of the chart shows.",
    },
    {
      state: { ...INDUCTION },
      section: "compare",
      look: "#comparison",
      text: "The table runs one input through the other variants and measures how far each output is from that of softmax: an output of zeros would have an error of 1, and gated with 11.9 and sigmoid with 1.31 are farther, because they do not divide the weights of a row by their sum. On this sharp pattern, Taylor attention with 0.652 is closer than linear attention with 0.739, but neither of them is close.",
    },
  ],
};
