// Example inputs. The page computes each one; they are the same every time.

import { fromNumbers } from "../data/tensors.js";
import { WORDS } from "./six_words.js";

const WORD_LABELS = ["Your", "journey", "starts", "with", "one", "step"];

// torch.rand after torch.manual_seed(1234), as in the exercise of the book
const PROJECTIONS = {
  W_query: [
    [0.02897924, 0.40189856],
    [0.25984418, 0.36664134],
    [0.05830073, 0.70064473],
  ],
  W_key: [
    [0.05179739, 0.46813923],
    [0.67380613, 0.33146197],
    [0.78370804, 0.5630632],
  ],
  W_value: [
    [0.77485049, 0.82080257],
    [0.27927655, 0.68171108],
    [0.28367496, 0.65673041],
  ],
};

/**
 * The examples. `create()` returns the parts of a request:
 *   tensors: [{name, role, tensor}], labels, variant, parameters; optional: layer, and selectedRow,
 *   the row that is pinned first
 */
export const EXAMPLES = [
  {
    id: "words",
    title: "Six words",
    about:
      "“Your journey starts with one step”: each word is a vector, used as query, key and value. It attends most to long vectors that point the same way.",
    create: () => ({
      tensors: [createWords("query, key, value")],
      labels: WORD_LABELS,
      variant: "softmax",
      parameters: { scale: 1 },
    }),
  },
  {
    id: "layer",
    title: "Six words through a layer",
    about:
      "The same words, projected to query, key and value by an untrained layer. Its weights are random, so attention is nearly uniform.",
    create: () => ({
      tensors: [createWords("x")],
      labels: WORD_LABELS,
      variant: "softmax",
      parameters: {},
      layer: { layout: "v1", tensors: PROJECTIONS },
    }),
  },
  {
    id: "induction",
    title: "Induction",
    about:
      "Four heads over a sentence with repeated words. They attend to the words that followed the same word before, the previous word, the same word and the first word.",
    create: createInduction,
  },
  {
    id: "local",
    title: "Local pattern",
    about:
      "64 positions and four heads. They attend to near neighbours, to a wider neighbourhood, four positions back, and to every eighth position.",
    create: createLocal,
  },
  {
    id: "document",
    title: "Long document",
    about:
      "4096 positions in sections with recurring topics. The service pools the map to 256 × 256. The page fetches a pinned row in full.",
    create: createDocument,
  },
  {
    id: "linear-layer",
    title: "A linear layer",
    about:
      "The six words through a linear layer, written as attention over the three features of each word.",
    create: () => ({
      tensors: [
        createWords("x"),
        createTensor("weight", [2, 3], [0.54, 0.28, -0.06, -0.03, 0.33, -0.4]),
      ],
      labels: WORD_LABELS,
      variant: "linear_layer",
      parameters: {},
    }),
  },
];

/** Creates a tensor; a short one is sent as lists, as a user would write it. */
function createTensor(name, shape, numbers, role = name) {
  const isShort = numbers.length <= 64;
  const tensor = fromNumbers(numbers, shape, isShort ? "float64" : "float32");
  return { name, role, tensor: isShort ? { ...tensor, literal: true } : tensor };
}

const createWords = (role) => createTensor("words", [6, 3], WORDS.flat(), role);

function createInduction() {
  const text = "the cat saw the dog and the dog saw the cat and then the cat saw the dog again";
  const labels = text.split(" ");
  const random = createNormal(7);
  const [width, length] = [24, labels.length];
  const wordVectors = new Map(labels.map((word) => [word, randomUnitVector(random, width)]));
  const positionVectors = labels.map(() => randomUnitVector(random, width));
  const word = (i) => wordVectors.get(labels[i]);
  const zero = new Float64Array(width);
  const heads = [
    { query: word, key: (j) => (j ? word(j - 1) : zero) },
    { query: (i) => positionVectors[Math.max(i - 1, 0)], key: (j) => positionVectors[j] },
    { query: word, key: word },
    { query: () => positionVectors[0], key: (j) => positionVectors[j] },
  ];
  const stackHeads = (of) => heads.flatMap((head) => labels.flatMap((_, i) => [...of(head)(i)]));
  const shape = [1, heads.length, length, width];
  const sharp = stackHeads((head) => (i) => head.query(i).map((x) => 6 * x));
  return {
    tensors: [
      createTensor("query", shape, sharp),
      createTensor(
        "key",
        shape,
        stackHeads((head) => head.key),
      ),
      createTensor(
        "value",
        shape,
        stackHeads(() => word),
      ),
    ],
    labels,
    selectedRow: 10,
    variant: "softmax",
    parameters: { causal: true, scale: 1 },
  };
}

function createLocal() {
  const [length, waves] = [64, 24];
  const heads = [
    { sharp: 7, step: 0, slowest: 16 },
    { sharp: 7, step: 0, slowest: 64 },
    { sharp: 8, step: -4, slowest: 16 },
    { sharp: 5, step: 0, every: 8 },
  ];
  // the sum over frequencies of cos(f (i + step - j)) is large where j is i + step
  const features = (at, { slowest, every }) =>
    Array.from({ length: waves }, (_, w) => {
      const frequency = every
        ? (2 * Math.PI * (1 + (w % 3))) / every
        : (Math.PI * (w + 0.5)) / waves / (slowest / 8);
      return [Math.cos(frequency * at), Math.sin(frequency * at)];
    }).flat();
  const stackHeads = (of) =>
    heads.flatMap((head) => Array.from({ length }, (_, i) => of(head, i)).flat());
  const shape = [1, heads.length, length, 2 * waves];
  const query = (head, i) => features(i + head.step, head).map((x) => (head.sharp / waves) * x);
  return {
    tensors: [
      createTensor("query", shape, stackHeads(query)),
      createTensor(
        "key",
        shape,
        stackHeads((head, i) => features(i, head)),
      ),
      createTensor(
        "value",
        shape,
        stackHeads((head, i) => features(i, head)),
      ),
    ],
    labels: [],
    selectedRow: 32,
    variant: "softmax",
    parameters: { scale: 1 },
  };
}

function createDocument() {
  const [length, heads, width] = [4096, 2, 16];
  const random = createNormal(11);
  const subjects = Array.from({ length: 5 }, () => randomUnitVector(random, width));
  const sections = [0, 1, 0, 2, 3, 1, 4, 0, 2, 4];
  const begins = [0, 330, 900, 1150, 1800, 2150, 2700, 3000, 3420, 3760, length];
  const query = new Float64Array(heads * length * width);
  const key = new Float64Array(heads * length * width);
  const value = new Float64Array(heads * length * width);
  let section = 0;
  for (let i = 0; i < length; i += 1) {
    if (i >= begins[section + 1]) section += 1;
    const subject = subjects[sections[section]];
    const turn = (2 * Math.PI * i) / (1.5 * length);
    for (let c = 0; c < width; c += 1) {
      const near = c < 2 ? [Math.cos(turn), Math.sin(turn)][c] : 0;
      const noise = 0.12 * random();
      const about = subject[c] + noise;
      const far = length * width + i * width + c;
      query[i * width + c] = 5.5 * about;
      key[i * width + c] = about;
      query[far] = c < 2 ? 25 * near : noise;
      key[far] = c < 2 ? near : noise;
      value[i * width + c] = value[far] = about;
    }
  }
  const shape = [1, heads, length, width];
  return {
    tensors: [
      createTensor("query", shape, query),
      createTensor("key", shape, key),
      createTensor("value", shape, value),
    ],
    labels: [],
    selectedRow: 1000,
    variant: "softmax",
    parameters: { scale: 1 },
  };
}

/** Returns the first example without a layer whose tensors meet a condition. */
export function findExample(isMet) {
  return EXAMPLES.find((example) => {
    const { tensors, layer } = example.create();
    return !layer && isMet(tensors);
  });
}

/** Returns a generator of normally distributed numbers (mulberry32, Box-Muller). */
export function createNormal(seed) {
  let state = seed;
  const uniform = () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return (((mixed ^ (mixed >>> 14)) >>> 0) + 1) / 4294967297;
  };
  return () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
}

function randomUnitVector(random, width) {
  const numbers = Float64Array.from({ length: width }, random);
  const norm = Math.hypot(...numbers);
  return numbers.map((x) => x / norm);
}
