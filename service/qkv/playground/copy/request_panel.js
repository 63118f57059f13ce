// The requests that the page made, as others would make them.

import { getKey } from "../api_key.js";
import { formatCount, h, setText } from "../dom.js";
import { BODY_FILE, curlCommand, pythonProgram, serializeBody } from "./code_snippets.js";

const MAX_SHOWN_LENGTH = 4000; // characters; numbers in base64 go on for millions
const FORMATS = { curl: curlCommand, Python: pythonProgram };

/**
 * The panel with the request.
 *
 * @param {HTMLElement} root
 * @param {(text: string) => void} announce told that it was copied
 * @returns {(purpose: string, request: {path, body}) => void} told of the last one of each kind
 */
export function createRequestPanel(root, announce) {
  const requests = new Map();
  let format = "curl";
  const code = h("code");
  const area = h("pre", { tabindex: "0", role: "region", "aria-label": "The request" }, code);
  const copyButton = h("button", { type: "button", click: () => copyCode() }, "Copy");
  const saveBody = () => saveFile(serializeBody(requests.get(requestSelect.value).body).json);
  const saveButton = h(
    "button",
    { type: "button", hidden: true, click: saveBody },
    `Save ${BODY_FILE}`,
  );
  const about = h("p", { class: "hint", hidden: true });
  const tabs = Object.keys(FORMATS).map((name) =>
    h("button", { type: "button", class: "quiet", click: () => chooseFormat(name) }, name),
  );
  const requestSelect = h("select", { id: "request-of", change: () => update() });
  const field = h(
    "div",
    { class: "field inline" },
    h("label", { for: "request-of" }, "What for"),
    requestSelect,
  );
  root.append(
    h(
      "div",
      { class: "row" },
      field,
      h("div", { class: "tabs", role: "group", "aria-label": "Written for" }, ...tabs),
      saveButton,
      copyButton,
    ),
    about,
    area,
  );

  const createSource = () =>
    FORMATS[format](requests.get(requestSelect.value), location.origin, Boolean(getKey()));
  const update = () => {
    for (const tab of tabs) tab.setAttribute("aria-pressed", String(tab.textContent === format));
    if (!requests.size) return;
    const source = createSource();
    saveButton.hidden = !source.includes(BODY_FILE);
    const files = [...source.matchAll(/np\.load\("(.*)"\)/g)].map(([, file]) => file);
    const neededFiles = [...(saveButton.hidden ? [] : [BODY_FILE]), ...new Set(files)];
    setText(about, neededFiles.length && `Run it in a folder that has ${neededFiles.join(", ")}.`);
    const hiddenLength = source.length - MAX_SHOWN_LENGTH;
    code.textContent =
      hiddenLength > 0
        ? `${source.slice(0, MAX_SHOWN_LENGTH)}… and ${formatCount(hiddenLength)} characters more`
        : source;
  };
  const chooseFormat = (name) => {
    format = name;
    update();
  };
  const copyCode = async () => {
    try {
      await navigator.clipboard.writeText(createSource());
      copyButton.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // a page without https has no clipboard
      copyButton.textContent = "Selected";
    }
    announce(`${copyButton.textContent} as ${format}`);
    setTimeout(() => (copyButton.textContent = "Copy"), 1500);
  };
  update();
  return (purpose, request) => {
    if (!requests.has(purpose)) requestSelect.append(new Option(purpose));
    requests.set(purpose, request);
    if (purpose === requestSelect.value) update();
  };
}

function saveFile(json) {
  const url = URL.createObjectURL(new Blob([json], { type: "application/json" }));
  h("a", { href: url, download: BODY_FILE }).click();
  setTimeout(() => URL.revokeObjectURL(url));
}
