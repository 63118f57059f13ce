// Writes the parts of a program that read the layer of a checkpoint, and the inputs of a run on it.
//
// The program reads the layer from the checkpoint, as a user would, and the inputs from the saved
// body, because the page has drawn or rounded them.

/** The file name of a saved body with a layer of a checkpoint. */
export const BINARY_FILE = "request.safetensors";

/** Returns the arguments of curl that send a saved body. */
export const curlArguments = () => [
  "-H 'Content-Type: application/vnd.safetensors'",
  "-H 'Accept: application/json'",
  `--data-binary @${BINARY_FILE}`,
];

/** Returns lines of Python that set `tensors` to those of the layer, and `inputs`. */
export function readLines({ inputs, layer }) {
  const names = Object.keys(layer.tensors);
  const files = [...new Set(names.map((name) => layer.tensors[name].file))];
  const read = (variable, file, names) => [
    `with safe_open(${JSON.stringify(file)}, framework="numpy") as file:`,
    "    names = [",
    ...names.map((name) => `        ${JSON.stringify(name)},`),
    "    ]",
    `    ${variable} = {name: file.get_tensor(name) for name in names}`,
  ];
  const parts = files.map((file, at) => {
    const own = names.filter((name) => layer.tensors[name].file === file);
    return read(at ? "more" : "tensors", file, own).concat(at ? ["tensors |= more"] : []);
  });
  return [...parts, read("inputs", BINARY_FILE, Object.keys(inputs))].flat();
}
