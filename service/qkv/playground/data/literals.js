// Parses numbers as Python writes them: lists, and printed arrays of numpy and torch.

const TOKENS =
  /\s+|#[^\n]*|(\.\.\.|…)|([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf\b|nan\b))|"([^"]*)"|'([^']*)'|([A-Za-z_][\w.]*)|([^\s])/gy;
const NAMES = { True: true, False: false, true: true, false: false };
const CLOSING = { "[": "]", "(": ")" };

/**
 * Parses a text such as [[1, 2], [3, 4]], [[1. 2.] [3. 4.]], array([1, 2]), x = tensor([True]) or
 * {'query': [[1]]}.
 *
 * @param {string} text
 * @param {string} name of a tensor without one
 * @returns {Object<string, Array>} nested lists as JSON has them, by name
 * @throws {Error} a message for the user
 */
export function parseLiterals(text, name) {
  const reader = createReader(text);
  const values = {};
  while (reader.peek()) {
    const isNamed = reader.peek().word && reader.peek(1)?.mark === "=";
    const own = isNamed ? reader.next().word : name;
    if (isNamed) reader.next();
    const value = readValue(reader);
    if (Array.isArray(value)) values[own] = value;
    else if (value !== null && typeof value === "object") Object.assign(values, value);
    else throw new Error(`the text has ${JSON.stringify(value)}, expected a list of numbers`);
    if (reader.peek()?.mark === ";") reader.next();
  }
  return values;
}

function createReader(text) {
  const tokens = [];
  for (const [whole, dots, number, double, single, word, mark] of text.matchAll(TOKENS)) {
    if (dots) throw new Error(ELIDED);
    const string = double ?? single;
    if (number ?? string ?? word ?? mark) tokens.push({ whole, number, string, word, mark });
  }
  let at = 0;
  return {
    peek: (ahead = 0) => tokens[at + ahead],
    next: () => {
      if (at >= tokens.length) throw new Error("the text ends inside a list");
      return tokens[at++];
    },
  };
}

const ELIDED =
  "the printed array leaves out numbers (...): print it after " +
  "np.set_printoptions(threshold=10**9) or torch.set_printoptions(profile='full')";

function readValue(reader) {
  const { whole, number, word, mark } = reader.next();
  if (number) return toJsonNumber(number);
  if (word && Object.hasOwn(NAMES, word)) return NAMES[word];
  if (word && reader.peek()?.mark === "(") return readCall(reader);
  if (mark && Object.hasOwn(CLOSING, mark)) return readList(reader, CLOSING[mark]);
  if (mark === "{") return readDict(reader);
  throw new Error(`the text has ${whole.slice(0, 40)}, expected a number or a list`);
}

/** Returns a number as JSON of the service has it: NaN and infinities are words. */
function toJsonNumber(text) {
  const isSpecial = /inf|nan/.test(text);
  if (!isSpecial) return Number(text);
  if (text.includes("nan")) return "NaN";
  return text.startsWith("-") ? "-Infinity" : "Infinity";
}

/** Reads the list of a call such as tensor([1], device='cuda:0'); skips its other arguments. */
function readCall(reader) {
  reader.next();
  const value = readValue(reader);
  for (let depth = 1; depth;) {
    const { mark } = reader.next();
    if (mark === "(") depth += 1;
    if (mark === ")") depth -= 1;
  }
  return value;
}

/** Reads a list to its closing bracket; numpy prints lists without commas. */
function readList(reader, closing) {
  const values = [];
  while (reader.peek()?.mark !== closing) {
    values.push(readValue(reader));
    if (reader.peek()?.mark === ",") reader.next();
  }
  reader.next();
  return values;
}

function readDict(reader) {
  const values = [];
  while (reader.peek()?.mark !== "}") {
    const { string, whole } = reader.next();
    if (string === undefined || reader.next().mark !== ":") {
      throw new Error(`the text has ${whole.slice(0, 40)}, expected a name in quotes and a colon`);
    }
    values.push([string, readValue(reader)]);
    if (reader.peek()?.mark === ",") reader.next();
  }
  reader.next();
  return Object.fromEntries(values);
}
