// Causal masks: the words to come are hidden, and the plainest rule that looks back is an average.

const CAUSAL = { example: "words", "parameters.causal": true };

export const causal = {
  id: "causal",
  title: "Causal masks",
  purpose: "Words that see only the past, and the average as the plainest attention.",
  stops: [
    {
      state: { ...CAUSAL, "parameters.scale": 1, row: 1 },
      section: "weights",
      look: "#map .surface",
      text: "A model that writes must not see the words that are still to come, so a causal mask hides them, and the map is hatched above its diagonal. The first word can only take from itself; the second, “journey”, takes 0.6320 from itself and 0.3680 from “Your”.",
    },
    {
      state: { ...CAUSAL, "parameters.scale": 1, row: 5 },
      section: "weights",
      look: "#row table",
      text: "The scores are hidden before they become weights, so the weights of the words that a row may see always add up to 1. “step” is the last word and sees all six: switch causal off, and its row stays as it is, with 0.2184 for “journey” and 0.0988 for “one”.",
    },
    {
      state: { example: "words", variant: "mean", row: 3 },
      section: "weights",
      look: "#row table",
      text: "The plainest rule that looks back gives all words so far the same weight: the whole to the first, then halves, then thirds. “with” is the fourth word and takes 0.2500 from each of four, so its output is the average of the text up to there.",
    },
    {
      state: { ...CAUSAL, "parameters.scale": 0, difference: "mean", row: 3 },
      section: "compare",
      look: "#difference .beside",
      text: "Softmax with a scale of 0 does exactly this, because all scores become equal, and equal scores give equal weights. The map of the difference between the two is blank wherever it is not hatched, and the total variation of each row, the part of its weight that differs, is 0.000.",
    },
    {
      state: { ...CAUSAL, "parameters.scale": 1, difference: "mean", row: 3 },
      section: "compare",
      look: "#difference .beside",
      text: "With a scale of 1 the words choose again, and this map shows what the choice changes: blue where softmax gives more than the average does, orange where it gives less. The largest change is in the row of “journey”, where 0.132 of the weight moves from “Your” to “journey” itself.",
    },
    {
      state: { ...CAUSAL, "parameters.scale": 1, "parameters.window": "[1,0]", row: 5 },
      section: "weights",
      look: "#row table",
      text: "Many models hide old words too, because long texts are costly: with a window of [1,0], a word sees itself and one word before. “step” now takes 0.6573 from itself and 0.3427 from “one”, and a row has at most two weights however long the text is.",
    },
  ],
};
