// The requests that the page made, as others would make them.

import { h, many, say } from "./dom.js";
import { key } from "./key.js";
import { BODY, curl, python, written } from "./snippets.js";

const SHOWN = 4000; // characters; numbers in base64 go on for millions
const KINDS = { curl, Python: python };

/**
 * The panel with the request.
 *
 * @param {HTMLElement} root
 * @param {(text: string) => void} speak told that it was copied
 * @returns {(what: string, request: {path, body}) => void} told of the last one of each kind
 */
export function requestPanel(root, speak) {
  const requests = new Map();
  let kind = "curl";
  const code = h("code");
  const area = h("pre", { tabindex: "0", role: "region", "aria-label": "The request" }, code);
  const copy = h("button", { type: "button", click: () => copied() }, "Copy");
  const save = h(
    "button",
    { type: "button", hidden: true, click: () => saved(written(requests.get(which.value).body).json) },
    `Save ${BODY}`,
  );
  const about = h("p", { class: "hint", hidden: true });
  const tabs = Object.keys(KINDS).map((name) =>
    h("button", { type: "button", class: "quiet", click: () => pick(name) }, name),
  );
  const which = h("select", { id: "request-of", change: () => show() });
  const field = h(
    "div",
    { class: "field inline" },
    h("label", { for: "request-of" }, "What for"),
    which,
  );
  root.append(
    h(
      "div",
      { class: "row" },
      field,
      h("div", { class: "tabs", role: "group", "aria-label": "Written for" }, ...tabs),
      save,
      copy,
    ),
    about,
    area,
  );

  const text = () => KINDS[kind](requests.get(which.value), location.origin, Boolean(key()));
  const show = () => {
    for (const tab of tabs) tab.setAttribute("aria-pressed", String(tab.textContent === kind));
    if (!requests.size) return;
    const whole = text();
    save.hidden = !whole.includes(BODY);
    const files = [...whole.matchAll(/np\.load\("(.*)"\)/g)].map(([, file]) => file);
    const needed = [...(save.hidden ? [] : [BODY]), ...new Set(files)];
    say(about, needed.length && `Run it in a folder that has ${needed.join(", ")}.`);
    const rest = whole.length - SHOWN;
    code.textContent =
      rest > 0 ? `${whole.slice(0, SHOWN)}… and ${many(rest)} characters more` : whole;
  };
  const pick = (name) => {
    kind = name;
    show();
  };
  const copied = async () => {
    try {
      await navigator.clipboard.writeText(text());
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // a page without https has no clipboard
      copy.textContent = "Selected";
    }
    speak(`${copy.textContent} as ${kind}`);
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  };
  show();
  return (what, request) => {
    if (!requests.has(what)) which.append(new Option(what));
    requests.set(what, request);
    if (what === which.value) show();
  };
}

function saved(json) {
  const url = URL.createObjectURL(new Blob([json], { type: "application/json" }));
  h("a", { href: url, download: BODY }).click();
  setTimeout(() => URL.revokeObjectURL(url));
}
