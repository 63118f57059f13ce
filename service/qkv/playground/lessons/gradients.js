// Gradients: how far one number of the output follows each number of the inputs.

const JOURNEY = { example: "words", entry: "1,0", row: 1 };

export const gradients = {
  id: "gradients",
  title: "Gradients",
  purpose: "How one number of the output follows each number of the inputs.",
  stops: [
    {
      state: { ...JOURNEY },
      section: "gradients",
      look: ".gradient-entry",
      text: "Take one number of the output, the one of “journey” in channel 0, which is 0.4419, and change one number of the queries, keys or values a little: the gradient is the change of the output divided by that change. For the values it is the row of weights, because the output is their weighted average: 0.2379 for its own value and 0.1082 for that of “one”.",
    },
    {
      state: { ...JOURNEY },
      section: "gradients",
      look: ".gradient-maps",
      text: "A gradient can be checked without any calculus: the service has made each number a little larger, then a little smaller, and the maps of these finite differences look the same as those of the gradients. Each word is query, key and value at once here, but only one of the three changes at a time, so the gradient by a word is the sum of its three rows.",
    },
    {
      state: { ...JOURNEY },
      section: "gradients",
      look: ".gradient-maps",
      text: "A key moves the output through the weights alone: if its weight grows, the others shrink. The numbers of “journey” are positive, so the sign tells where a value lies: “one” has 0.77 in channel 0, above 0.4419, and its key has positive gradients; “step” has 0.05, and its key has negative ones.",
    },
    {
      state: { ...JOURNEY, "parameters.causal": true, "parameters.scale": 1 },
      section: "gradients",
      look: ".gradient-maps",
      text: "With a causal mask, “journey” sees only “Your” and itself, and the gradients of the four later words are exactly 0. What a word cannot see cannot move it, so in training each word learns from its past alone, and all words of a text can be trained at once.",
    },
    {
      state: { ...JOURNEY, "parameters.causal": true, "parameters.scale": 30 },
      section: "gradients",
      look: ".gradient-maps",
      text: "With a scale of 30, “journey” chooses itself with a weight of 1.0000, and the gradients of queries and keys are below a millionth, so training could hardly change the choice any more. This is why models keep the scores small: they divide them by the square root of the number of channels.",
    },
  ],
};
