// Asks the user for the API key if the service requires one; keeps it until the tab is closed.

import { h } from "./dom.js";

const STORAGE_KEY = "qkv-key";

let pendingPrompt = null;

/** Returns the API key, or null. */
export const getKey = () => sessionStorage.getItem(STORAGE_KEY);

/** Removes the API key. */
export const forgetKey = () => sessionStorage.removeItem(STORAGE_KEY);

/**
 * Opens the dialog for the API key. Calls during that time share the same dialog.
 *
 * @param {boolean} wasRejected the service rejected the key before
 * @returns {Promise<boolean>} true if the user entered a key
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
    pattern: "\\s*[!-~]+\\s*", // no header has other characters
    title: "printable ASCII without spaces, as keys have",
    "aria-describedby": "key-about",
  });
  const about = wasRejected
    ? "The service rejected this key."
    : "This service requires an API key. This tab keeps the key until you close it.";
  const dialog = h(
    "dialog",
    { class: "box", "aria-labelledby": "key-title" },
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "key-title" }, "API key required"),
      h("p", { id: "key-about", class: wasRejected ? "error" : "hint" }, about),
      h("div", { class: "field" }, h("label", { for: "key" }, "API key"), input),
      h(
        "div",
        { class: "row" },
        h("button", { class: "primary", value: "use" }, "Use key"),
        h("button", { value: "cancel", formnovalidate: true }, "Cancel"),
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
