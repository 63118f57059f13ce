// Why linear attention is linear: what softmax costs, which order of products avoids it, and the price.

export const linear = {
  id: "linear",
  title: "Why linear is linear",
  purpose: "A text twice as long should cost twice as much, not four times.",
  stops: [
    {
      state: { example: "document", row: 1000 },
      section: "weights",
      text: "This text has 4096 positions, and softmax compares each of them with each: the map stands for 4096 × 4096 weights, drawn as 256 × 256 cells. A text twice as long would have four times as many weights.",
    },
    {
      state: { example: "words" },
      section: "length",
      look: "#sweep .chart",
      measure: {
        variants: ["softmax", "linear"],
        mode: "whole",
        longest: 4096,
        heads: 1,
        width: 64,
        repeats: 9,
      },
      text: "The service measures the time of a call at each length, and every step to the right is a text twice as long. The time of softmax climbs ever more steeply, while that of linear attention grows no faster than the text, and this is why it is called linear.",
    },
    {
      state: { example: "words", variant: "linear", row: 1 },
      section: "weights",
      look: "#weights .formula",
      text: "Softmax takes an exponential of each query times each key; linear attention passes queries and keys through a function phi first and then only multiplies, as the formula says. The weights are still positive and add up to 1, but each of them is now a plain product of a list for the query and a list for the key, divided by the sum of these products in its row.",
    },
    {
      state: { example: "words", variant: "linear", row: 1 },
      section: "steps",
      look: "[data-step=value_sums], [data-step=feature_sums], [data-step=numerators]",
      text: "Products can be taken in another order: step 9 adds up all keys times their values, a table of 3 × 3 numbers, step 10 the keys alone, three sums for the division, and step 11 multiplies the query by the table. The output is the same, neither the table nor the sums grow with the text, and the 6 × 6 map is only computed because you look at it.",
    },
    {
      state: { example: "induction", variant: "linear", "parameters.causal": true, row: 10 },
      section: "weights",
      look: "#row table",
      text: "The price is sharpness, because a product cannot grow as fast as an exponential. In the sentence about the cat and the dog, linear attention gives only 0.1050 to the “saw” that softmax chose, and half of the weight is on 6 words.",
    },
    {
      state: { example: "induction", difference: "linear", row: 10 },
      section: "compare",
      look: "#difference .beside",
      text: "The difference map shows it for all words: softmax has the few dark blue cells, and linear attention a thin layer over everything else. On average, 0.583 of the weight of a row goes to other words, so a model must be trained with linear attention and cannot simply be switched to it.",
    },
  ],
};
