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
      text: "Each row of the map belongs to one word, and its numbers say how much that word takes from each word of the sentence. “journey” takes 0.2379 from itself and 0.2333 from “starts”, but only 0.1082 from “one”; its six weights add up to 1, which is 100 % in the last column.",
    },
    {
      state: { example: "words", row: 1 },
      section: "steps",
      look: "[data-step=scores]",
      text: "A word is a list of three numbers here, and the score of two words is the sum of the products of their numbers, which is large if the lists point the same way and are long. “journey” has a score of 1.50 with itself, 1.48 with “starts”, whose list is nearly the same, and only 0.707 with “one”.",
    },
    {
      state: { example: "words", row: 1 },
      section: "steps",
      look: "[data-step=exponentials], [data-step=row_sums], [data-step=weights]",
      text: "Softmax turns the scores of a row into weights: it subtracts the largest score from all, exponentials make them positive, and a division by their sum makes them add up to 1. “journey” itself has the largest score, and e^(1.50 − 1.50) is 1.00, which divided by the sum of 4.20 is a weight of 0.238; for “one”, 0.455 divided by 4.20 is 0.108.",
    },
    {
      state: { example: "words", row: 1 },
      section: "steps",
      look: "[data-step=terms], [data-step=output]",
      text: "Each word also gives a list to the others, its value: step 9 multiplies every value by its weight, and step 10 adds the six results, which makes 0.442, 0.651 and 0.568 for “journey”. That is all that attention does: every word leaves as a mixture of all words, and the weights decide the mixture.",
    },
    {
      state: { example: "words", "parameters.scale": 8, row: 1 },
      section: "weights",
      look: "#row table",
      text: "Scores are multiplied by a scale before they become weights, and the larger it is, the choosier the words are. With a scale of 8 instead of 1, “journey” takes 0.5226 from itself, 0.4468 from “starts” and almost nothing from the rest.",
    },
    {
      state: { example: "layer", row: 1 },
      section: "weights",
      look: "#row table",
      text: "In a model, each word makes three lists: a query, which says what it looks for, a key, by which others find it, and a value, which it gives to them. This layer has not learned anything yet, so “journey” hardly chooses: it takes between 0.1285 and 0.2043 from each word.",
    },
    {
      state: { example: "induction", row: 10 },
      section: "weights",
      look: "#row table",
      text: "This head is built to do what training teaches some heads of real models: find the same word earlier in the text, and take from the word that followed it. The second “cat” takes 0.9651 from “saw”, which followed the first one, and so the model can guess how the text goes on.",
    },
  ],
};
