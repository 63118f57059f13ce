// The service's key: asked for when the service wants one, kept until the tab is closed.

import { h } from "./dom.js";

const NAME = "qkv-key";

let asking = null;

/** The key, or null. */
export const key = () => sessionStorage.getItem(NAME);

/** Forgets it. */
export const forgetKey = () => sessionStorage.removeItem(NAME);

/**
 * Asks whoever sits here for a key; whoever calls meanwhile waits for the same answer.
 *
 * @param {boolean} again one came before, and was refused
 * @returns {Promise<boolean>} whether there is one now
 */
export function askForKey(again) {
  asking ??= ask(again).finally(() => {
    asking = null;
  });
  return asking;
}

function ask(again) {
  const input = h("input", {
    id: "key",
    type: "password",
    autocomplete: "off",
    required: true,
    "aria-describedby": "key-about",
  });
  const about = again
    ? "The service did not take that key."
    : "This service answers those who have one of its keys. It is kept in this tab until you close it.";
  const dialog = h(
    "dialog",
    { class: "key", "aria-labelledby": "key-title" },
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "key-title" }, "A key, please"),
      h("p", { id: "key-about", class: again ? "error" : "hint" }, about),
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
      const given = dialog.returnValue === "use" && input.value.trim();
      if (given) sessionStorage.setItem(NAME, given);
      dialog.remove();
      resolve(Boolean(given));
    });
  });
}
