// The service's key: asked for when the service wants one, kept until the tab is closed.

import { h } from "./dom.js";

const STORAGE_KEY = "qkv-key";

let pendingPrompt = null;

/** The key, or null. */
export const getKey = () => sessionStorage.getItem(STORAGE_KEY);

/** Forgets it. */
export const forgetKey = () => sessionStorage.removeItem(STORAGE_KEY);

/**
 * Asks whoever sits here for a key; whoever calls meanwhile waits for the same answer.
 *
 * @param {boolean} wasRejected one came before, and was refused
 * @returns {Promise<boolean>} whether there is one now
 */
export function promptForKey(wasRejected) {
  pendingPrompt ??= showDialog(wasRejected).finally(() => {
    pendingPrompt = null;
  });
  return pendingPrompt;
}

function showDialog(wasRejected) {
  const input = h("input", {
    id: "key",
    type: "password",
    autocomplete: "off",
    required: true,
    "aria-describedby": "key-about",
  });
  const about = wasRejected
    ? "The service did not take that key."
    : "This service answers those who have one of its keys. It is kept in this tab until you close it.";
  const dialog = h(
    "dialog",
    { class: "key", "aria-labelledby": "key-title" },
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "key-title" }, "A key, please"),
      h("p", { id: "key-about", class: wasRejected ? "error" : "hint" }, about),
      h("div", { class: "field" }, h("label", { for: "key" }, "API key"), input),
      h(
        "div",
        { class: "row" },
        h("button", { class: "primary", value: "use" }, "Use it"),
        h("button", { value: "leave", formnovalidate: true }, "Not now"),
      ),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const entered = dialog.returnValue === "use" && input.value.trim();
      if (entered) sessionStorage.setItem(STORAGE_KEY, entered);
      dialog.remove();
      resolve(Boolean(entered));
    });
  });
}
