// Shows the page's last requests as code to copy.

import { getKey } from "../api_key.js";
import { formatCount, h, setText } from "../dom.js";
import { saveFile } from "../keep/save_menu.js";
import { bodyFileName, createBodyFile, curlCommand, pythonProgram } from "./code_snippets.js";

const MAX_SHOWN_LENGTH = 4000; // characters; base64 can have millions
const FORMATS = { curl: curlCommand, Python: pythonProgram };

/**
 * Creates the panel.
 *
 * @param {HTMLElement} root
 * @param {(text: string) => void} announce called after a copy
 * @returns {(purpose: string, request: {path, body}) => void} sets the last request of a kind
 */
export function createRequestPanel(root, announce) {
  const requests = new Map();
  let format = "curl";
  const code = h("code");
  const area = h(
    "pre",
    { tabindex: "0", role: "region", "aria-label": "Code of the request" },
    code,
  );
  const copyButton = h("button", { type: "button", click: () => copyCode() }, "Copy");
  const saveBody = () => saveFile(createBodyFile(requests.get(requestSelect.value).body));
  const saveButton = h("button", { type: "button", hidden: true, click: saveBody });
  const about = h("p", { class: "hint", hidden: true });
  const tabs = Object.keys(FORMATS).map((name) =>
    h("button", { type: "button", class: "quiet", click: () => chooseFormat(name) }, name),
  );
  const requestSelect = h("select", { id: "request-of", change: () => update() });
  const field = h(
    "div",
    { class: "field inline" },
    h("label", { for: "request-of" }, "Code for"),
    requestSelect,
  );
  root.append(
    h(
      "div",
      { class: "row" },
      field,
      h("div", { class: "tabs", role: "group", "aria-label": "Language" }, ...tabs),
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
    const bodyFile = bodyFileName(requests.get(requestSelect.value).body);
    saveButton.hidden = !source.includes(bodyFile);
    saveButton.textContent = `Save ${bodyFile}`;
    const files = [...source.matchAll(/(?:np\.load|safe_open)\("(.*?)"/g)].map(([, file]) => file);
    const neededFiles = [...new Set([...(saveButton.hidden ? [] : [bodyFile]), ...files])];
    setText(about, neededFiles.length && `Run this in a folder with ${neededFiles.join(", ")}.`);
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
      getSelection().selectAllChildren(code); // the clipboard needs https or localhost
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
