// What attention is: six words, the weights of one row, and where they come from.

export const attention = {
  id: "attention",
  title: "What attention is",
  purpose: "Six words, and how much each of them takes from the others.",
  stops: [
    {
      state: { example: "words", row: 1 },
      section: "weights",
      look: "#map .surface",
      text: "Each row of the map belongs to one word, and its numbers say how much that word takes from each word of the sentence. “journey” takes 0.2379 from itself and 0.2333 from “starts”, but only 0.1082 from “one”; its six weights add up to 100 %.",
    },
    {
      state: { example: "words", row: 2 },
      section: "weights",
      look: "#row table",
      text: "A word is a list of three numbers here (press Edit under Tensors to see them), and words with similar lists take much from each other. “journey” and “starts” have nearly the same list, so “starts” takes 0.2369 from “journey” and 0.2326 from itself.",
    },
    {
      state: { example: "words", "parameters.scale": 8, row: 1 },
      section: "weights",
      look: "#row table",
      text: "How similar two words are is a number, their score, and softmax turns the scores of a row into weights; before that, each score is multiplied by the scale. A scale of 8 instead of 1 makes the words choosy: “journey” now takes 0.5226 from itself, 0.4468 from “starts” and almost nothing from the rest.",
    },
    {
      state: { example: "words", row: 1 },
      section: "output",
      look: "#output",
      text: "The output of a word is the average of the six lists, in which each list counts as much as its weight says. That is all that attention does: every word leaves with a mixture of all words, and the weights decide the mixture.",
    },
    {
      state: { example: "layer", row: 1 },
      section: "weights",
      look: "#row table",
      text: "In a model, each word makes three lists: a query, which says what it looks for, a key, by which others find it, and a value, which it gives to them. This layer has not learned anything yet, so “journey” takes nearly the same from all words, between 0.1285 and 0.2043.",
    },
    {
      state: { example: "induction", row: 10 },
      section: "weights",
      look: "#row table",
      text: "This layer is built to do what training teaches some heads of real models: find the same word earlier in the text, and take from the word that followed it. The second “cat” takes 0.9651 from “saw”, which followed the first one, and so the model can guess how the text goes on.",
    },
  ],
};
