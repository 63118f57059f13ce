// Writes a request as a curl command for bash and as a Python program.
//
// A request is {path: "/v1/attention/softmax", body}. Both forms read the API key from the
// environment variable QKV_API_KEY. Large arrays are read from files: from the uploaded .npy files,
// or from the body, saved as BODY_FILE.

import { encodeBody, isFromFile, isLoaded } from "../data/request_body.js";
import { BINARY_FILE, curlArguments, readLines } from "./checkpoint_snippets.js";

/** The file name of a saved body. */
export const BODY_FILE = "request.json";

const MAX_INLINE_LENGTH = 2 ** 14; // characters
const PYTHON_CONSTANTS = { NaN: "np.nan", Infinity: "np.inf", "-Infinity": "-np.inf" };

/** Returns a body as a file to save. */
export function createBodyFile(body) {
  const { content, type } = isFromFile(body.layer)
    ? encodeBody(body)
    : { content: serializeBody(body).json, type: "application/json" };
  return new File([content], bodyFileName(body), { type });
}

/** Returns the name of the file of a saved body. */
export const bodyFileName = ({ layer }) => (isFromFile(layer) ? BINARY_FILE : BODY_FILE);

/**
 * Returns the body as JSON, and whether it is too large to paste.
 *
 * @param {Object} body
 */
export function serializeBody(body) {
  const json = formatBody(body);
  return { json, isLarge: json.length > MAX_INLINE_LENGTH };
}

/**
 * Returns a command for bash that sends a request.
 *
 * @param {{path: string, body: Object}} request
 * @param {string} url of the service
 * @param {boolean} needsKey the service requires an API key
 */
export function curlCommand({ path, body }, url, needsKey = false) {
  const args = ["curl", "-sS"];
  // -N prints events at once; --json alone sets Accept to JSON
  if (path.endsWith("/sweep")) args.push("-N", "-H 'Accept: text/event-stream'");
  args.push(quoteForBash(url.replace(/\/$/, "") + path));
  if (needsKey) args.push('-H "Authorization: Bearer ${QKV_API_KEY:?is not set}"');
  if (isFromFile(body.layer)) return [...args, ...curlArguments()].join(" \\\n  ");
  const { json, isLarge } = serializeBody(body);
  return `${args.join(" ")} --json ${isLarge ? `@${BODY_FILE}` : quoteForBash(json)}`;
}

/**
 * Returns a Python program that sends a request with `qkv.Client`.
 *
 * @param {Object} request
 *   path: /v1/attention/{variant}, gradients/{variant}, compare or sweep; body
 *   files: names of the uploaded .npy files, by input
 * @param {string} url of the service
 * @param {boolean} needsKey the service requires an API key
 */
export function pythonProgram({ path, body, files = {} }, url, needsKey = false) {
  const [, , kind, variant] = path.split("/");
  const builders = {
    attention: () => attendCall(variant, body, files),
    gradients: () => gradientsCall(variant, body, files),
    compare: () => compareCall(body, files),
    sweep: () => sweepCall(body),
  };
  const lines = builders[kind]();
  const key = needsKey ? ', api_key=os.environ["QKV_API_KEY"]' : "";
  if (lines.some((line) => line.includes("body["))) {
    lines.unshift(`body = json.loads(Path(${toStringLiteral(BODY_FILE)}).read_text())`);
  }
  const header = `with Client(${toStringLiteral(url.replace(/\/$/, ""))}${key}) as client:`;
  const before = isFromFile(body.layer) ? [...readLines(body), ""] : [];
  const code = [...before, header, ...lines.map((line) => `    ${line}`)].join("\n");
  return `${addImports(code)}\n\n${code}\n`;
}

/** Adds the imports that the code needs, in the order of PEP 8. */
function addImports(code) {
  const standard = ["base64", "json", "os"]
    .filter((name) => code.includes(`${name}.`))
    .map((n) => `import ${n}`);
  if (code.includes("Path(")) standard.push("from pathlib import Path");
  const thirdParty = [
    ["ml_dtypes", "import ml_dtypes"],
    ["np", "import numpy as np"],
  ].flatMap(([name, line]) => (code.includes(`${name}.`) ? [line] : []));
  if (code.includes("safe_open(")) thirdParty.push("from safetensors import safe_open");
  return [standard, thirdParty, ["from qkv import Client"]]
    .filter((block) => block.length)
    .map((block) => block.join("\n"))
    .join("\n\n");
}

function attendCall(variant, body, files) {
  const { outputs, weights } = body;
  const args = [...runArguments(variant, body, files), ...keywordArguments({ outputs, weights })];
  return [...formatCall("run = client.attend", args), ...printArrays("run.outputs")];
}

function gradientsCall(variant, body, files) {
  const call = formatCall("run = client.gradients", runArguments(variant, body, files));
  return [...call, ...printArrays("run.gradients")];
}

function runArguments(variant, { inputs, parameters, layer, dtype }, files) {
  return [
    toStringLiteral(variant),
    ...arrayArguments(inputs, dtype, files),
    ...keywordArguments(parameters),
    ...layerArgument(layer, dtype),
  ];
}

const printArrays = (arrays) => [
  `for name, array in ${arrays}.items():`,
  '    print(name, array.shape, array, sep="\\n")',
];

function compareCall({ inputs, layer, variants, anchor, repeats, rows, dtype }, files) {
  const args = [
    toPythonLiteral(variants),
    ...arrayArguments(inputs, dtype, files),
    ...layerArgument(layer, dtype),
    ...keywordArguments({ anchor, repeats }),
    ...(rows === undefined ? [] : [`rows=${toPythonLiteral(rows)}`]), // null: all rows
  ];
  return [...formatCall("comparison = client.compare", args), "print(comparison.table())"];
}

function sweepCall({ variants, lengths, ...options }) {
  const args = [toPythonLiteral(variants), toPythonLiteral(lengths), ...keywordArguments(options)];
  const [first, ...rest] = formatCall("with client.sweep", args);
  return [
    first,
    ...rest.slice(0, -1),
    ") as cells:",
    "    for cell in cells:",
    "        print(cell)",
  ];
}

function formatCall(name, args) {
  return [`${name}(`, ...args.map((argument) => `    ${argument},`), ")"];
}

function keywordArguments(fields) {
  return Object.entries(fields ?? {})
    .filter(([, value]) => value !== undefined && value !== null)
    .map(([name, value]) => `${name}=${toPythonLiteral(value)}`);
}

function arrayArguments(tensors, dtype, files) {
  return Object.entries(tensors ?? {}).map(([name, tensor]) => {
    if (tensor.data instanceof Uint8Array) return `${name}=inputs[${toStringLiteral(name)}]`;
    const isFile = name in files && isLong(tensor);
    const bodyPath = `body["inputs"][${toStringLiteral(name)}]`;
    return `${name}=${isFile ? `np.load(${toStringLiteral(files[name])})` : arrayExpression(tensor, name, dtype, bodyPath)}`;
  });
}

const isLong = (tensor) => JSON.stringify(tensor).length > MAX_INLINE_LENGTH;

function layerArgument(layer, dtype) {
  if (layer === undefined || layer === null) return [];
  if (isLoaded(layer)) return [`layer=${toPythonLiteral(layer)}`];
  const { tensors: _, ...own } = layer;
  if (isFromFile(layer))
    return [`layer={${toPythonLiteral(own).slice(1, -1)}, "tensors": tensors}`];
  const tensors = Object.entries(layer.tensors).map(
    ([name, tensor]) =>
      `${toStringLiteral(name)}: ${arrayExpression(tensor, name, dtype, `body["layer"]["tensors"][${toStringLiteral(name)}]`)}`,
  );
  const rest = Object.entries(layer).filter(([name]) => name !== "tensors");
  const fields = rest.map(([name, value]) => `${toStringLiteral(name)}: ${toPythonLiteral(value)}`);
  return [`layer={${[...fields, `"tensors": {${tensors.join(", ")}}`].join(", ")}}`];
}

/**
 * Returns an expression for a tensor as an array. Lists get the dtype that the service gives them; a
 * long tensor is read from the saved body.
 */
function arrayExpression(tensor, name, dtype, bodyPath) {
  const isLarge = isLong(tensor);
  if (!Array.isArray(tensor)) {
    const bytes = `base64.b64decode(${isLarge ? `${bodyPath}["data"]` : toStringLiteral(tensor.data)})`;
    return `np.frombuffer(${bytes}, ${numpyDtype(tensor.dtype)}).reshape(${toPythonLiteral(tensor.shape)})`;
  }
  const floatDtype = dtype ?? "float32";
  const maskDtypes = { true: "bool", false: floatDtype === "float64" ? "float64" : "float32" };
  const dtypes = {
    key_lengths: "int64",
    mask: maskDtypes[typeof tensor.flat(Infinity)[0] === "boolean"],
  };
  return `np.array(${isLarge ? bodyPath : toPythonLiteral(tensor)}, ${numpyDtype(dtypes[name] ?? floatDtype)})`;
}

function numpyDtype(dtype) {
  if (dtype === "bool") return "bool"; // numpy 1.x lacks np.bool
  return dtype === "bfloat16" ? "ml_dtypes.bfloat16" : `np.${dtype}`;
}

/** Returns a JSON value as a Python literal. */
function toPythonLiteral(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Object.hasOwn(PYTHON_CONSTANTS, value)) return PYTHON_CONSTANTS[value];
  if (typeof value === "string") return toStringLiteral(value);
  if (Array.isArray(value)) return `[${value.map(toPythonLiteral).join(", ")}]`;
  if (typeof value !== "object") return String(value);
  return `{${Object.entries(value)
    .map(([name, item]) => `${toStringLiteral(name)}: ${toPythonLiteral(item)}`)
    .join(", ")}}`;
}

/** Quotes a string for Python, which has every escape of JSON except `\/`. */
function toStringLiteral(string) {
  return JSON.stringify(string);
}

/** Quotes a string as one word for bash. */
function quoteForBash(string) {
  return `'${string.replaceAll("'", "'\\''")}'`;
}

/** Formats a body with one line for each field, and for each field of `inputs`. */
function formatBody(body) {
  const lines = Object.entries(body).map(([name, value]) => {
    const fields = name === "inputs" ? Object.entries(value).map(formatField) : null;
    return fields
      ? `  "inputs": {\n    ${fields.join(",\n    ")}\n  }`
      : `  ${formatField([name, value])}`;
  });
  return `{\n${lines.join(",\n")}\n}`;
}

function formatField([name, value]) {
  return `${JSON.stringify(name)}: ${JSON.stringify(value)}`;
}
