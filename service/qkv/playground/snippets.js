// The request that the page sends, to copy: as a curl command for bash, and as a Python program.
//
// A request is {path: "/v1/attention/softmax", body}, with the body as it goes over the wire. A key
// is never written down: both read the environment variable QKV_API_KEY. What is too large to paste
// is read from files: arrays from those that they came in, all else from the body, saved as BODY.

/** Where a large body is, once it is saved. */
export const BODY = "request.json";

const LARGE = 2 ** 14; // characters
const PYTHON_WORDS = { NaN: "np.nan", Infinity: "np.inf", "-Infinity": "-np.inf" };

/**
 * The body as JSON, and whether it is too large to paste.
 *
 * @param {Object} body
 */
export function written(body) {
  const json = laidOut(body);
  return { json, isLarge: json.length > LARGE };
}

/**
 * A command that asks the same in bash.
 *
 * @param {{path: string, body: Object}} request
 * @param {string} url of the service
 * @param {boolean} keyed whether the service asks for a key
 */
export function curl({ path, body }, url, keyed = false) {
  const { json, isLarge } = written(body);
  const words = ["curl", "-sS"];
  // events as they come; --json alone would take no answer but JSON
  if (path.endsWith("/sweep")) words.push("-N", "-H 'Accept: text/event-stream'");
  words.push(quoted(url.replace(/\/$/, "") + path));
  if (keyed) words.push('-H "Authorization: Bearer ${QKV_API_KEY:?holds no key}"');
  return `${words.join(" ")} --json ${isLarge ? `@${BODY}` : quoted(json)}`;
}

/**
 * A program that asks the same by `qkv.Client`.
 *
 * @param {Object} request
 *   path: /v1/attention/{variant}, compare or sweep; body
 *   files: .npy of inputs, by name, where they came in such
 * @param {string} url of the service
 * @param {boolean} keyed whether the service asks for a key
 */
export function python({ path, body, files = {} }, url, keyed = false) {
  const [, , kind, variant] = path.split("/");
  const write = {
    attention: () => attend(variant, body, files),
    compare: () => compare(body, files),
    sweep: () => sweep(body),
  };
  const lines = write[kind]();
  const key = keyed ? ', api_key=os.environ["QKV_API_KEY"]' : "";
  if (lines.some((line) => line.includes("body["))) {
    lines.unshift(`body = json.loads(Path(${text(BODY)}).read_text())`);
  }
  const head = `with Client(${text(url.replace(/\/$/, ""))}${key}) as qkv:`;
  const code = [head, ...lines.map((line) => `    ${line}`)].join("\n");
  return `${imports(code)}\n\n${code}\n`;
}

/** What the code uses, in the order that Python's own style asks for. */
function imports(code) {
  const own = ["base64", "json", "os"]
    .filter((name) => code.includes(`${name}.`))
    .map((n) => `import ${n}`);
  if (code.includes("Path(")) own.push("from pathlib import Path");
  const others = [
    ["ml_dtypes", "import ml_dtypes"],
    ["np", "import numpy as np"],
  ].flatMap(([name, line]) => (code.includes(`${name}.`) ? [line] : []));
  return [own, others, ["from qkv import Client"]]
    .filter((block) => block.length)
    .map((block) => block.join("\n"))
    .join("\n\n");
}

function attend(variant, { inputs, parameters, layer, outputs, weights, dtype }, files) {
  const given = [
    text(variant),
    ...arrays(inputs, dtype, files),
    ...keywords(parameters),
    ...layerGiven(layer, dtype),
    ...keywords({ outputs, weights }),
  ];
  return [
    ...call("run = qkv.attend", given),
    "for name, array in run.outputs.items():",
    '    print(name, array.shape, array, sep="\\n")',
  ];
}

function compare({ inputs, layer, variants, anchor, repeats, rows, dtype }, files) {
  const given = [
    literal(variants),
    ...arrays(inputs, dtype, files),
    ...layerGiven(layer, dtype),
    ...keywords({ anchor, repeats }),
    ...(rows === undefined ? [] : [`rows=${literal(rows)}`]), // null: all of them
  ];
  return [...call("comparison = qkv.compare", given), "print(comparison.table())"];
}

function sweep({ variants, lengths, ...options }) {
  const given = [literal(variants), literal(lengths), ...keywords(options)];
  const [first, ...rest] = call("with qkv.sweep", given);
  return [
    first,
    ...rest.slice(0, -1),
    ") as cells:",
    "    for cell in cells:",
    "        print(cell)",
  ];
}

function call(name, given) {
  return [`${name}(`, ...given.map((argument) => `    ${argument},`), ")"];
}

function keywords(fields) {
  return Object.entries(fields ?? {})
    .filter(([, value]) => value !== undefined && value !== null)
    .map(([name, value]) => `${name}=${literal(value)}`);
}

function arrays(tensors, dtype, files) {
  return Object.entries(tensors ?? {}).map(([name, tensor]) => {
    const isFile = name in files && isLong(tensor);
    const place = `body["inputs"][${text(name)}]`;
    return `${name}=${isFile ? `np.load(${text(files[name])})` : array(tensor, name, dtype, place)}`;
  });
}

const isLong = (tensor) => JSON.stringify(tensor).length > LARGE;

function layerGiven(layer, dtype) {
  if (layer === undefined || layer === null) return [];
  if (typeof layer === "string") return [`layer=${text(layer)}`];
  const tensors = Object.entries(layer.tensors).map(
    ([name, tensor]) =>
      `${text(name)}: ${array(tensor, name, dtype, `body["layer"]["tensors"][${text(name)}]`)}`,
  );
  const rest = Object.entries(layer).filter(([name]) => name !== "tensors");
  const fields = rest.map(([name, value]) => `${text(name)}: ${literal(value)}`);
  return [`layer={${[...fields, `"tensors": {${tensors.join(", ")}}`].join(", ")}}`];
}

/**
 * A tensor as an array: lists get the dtype that the service would give them. A long one is read
 * from its place in the body.
 */
function array(tensor, name, dtype, place) {
  const long = isLong(tensor);
  if (!Array.isArray(tensor)) {
    const bytes = `base64.b64decode(${long ? `${place}["data"]` : text(tensor.data)})`;
    return `np.frombuffer(${bytes}, ${numpy(tensor.dtype)}).reshape(${literal(tensor.shape)})`;
  }
  const floating = dtype ?? "float32";
  const masks = { true: "bool", false: floating === "float64" ? "float64" : "float32" };
  const kinds = {
    key_lengths: "int64",
    mask: masks[typeof tensor.flat(Infinity)[0] === "boolean"],
  };
  return `np.array(${long ? place : literal(tensor)}, ${numpy(kinds[name] ?? floating)})`;
}

function numpy(dtype) {
  if (dtype === "bool") return "bool"; // numpy 1 has no np.bool
  return dtype === "bfloat16" ? "ml_dtypes.bfloat16" : `np.${dtype}`;
}

/** A value of JSON as Python writes it. */
function literal(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Object.hasOwn(PYTHON_WORDS, value)) return PYTHON_WORDS[value];
  if (typeof value === "string") return text(value);
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value !== "object") return String(value);
  return `{${Object.entries(value)
    .map(([name, item]) => `${text(name)}: ${literal(item)}`)
    .join(", ")}}`;
}

/** A string as both JSON and Python write it: Python reads every escape that JSON has but `\/`. */
function text(string) {
  return JSON.stringify(string);
}

/** One word for bash, whatever is in it. */
function quoted(string) {
  return `'${string.replaceAll("'", "'\\''")}'`;
}

/** JSON with a line for every field, and for every field of `inputs`. */
function laidOut(body) {
  const lines = Object.entries(body).map(([name, value]) => {
    const fields = name === "inputs" ? Object.entries(value).map(field) : null;
    return fields
      ? `  "inputs": {\n    ${fields.join(",\n    ")}\n  }`
      : `  ${field([name, value])}`;
  });
  return `{\n${lines.join(",\n")}\n}`;
}

function field([name, value]) {
  return `${JSON.stringify(name)}: ${JSON.stringify(value)}`;
}
