// The dialog in which the user pastes tensors or a request.

import { readText } from "../data/uploads.js";
import { h, setText } from "../dom.js";
import { toSentence } from "../error_messages.js";

/**
 * Creates the dialog.
 *
 * @param {(upload: {tensors, request}) => void} onPaste
 * @param {() => void} onUpload the user selects files instead
 * @returns {(onCancel?: () => void) => void} opens the dialog
 */
export function createPasteDialog(onPaste, onUpload) {
  const text = h("textarea", {
    id: "paste-text",
    rows: 12,
    spellcheck: "false",
    autocomplete: "off",
    "aria-describedby": "paste-about paste-error",
    placeholder: '{"query": [[1, 0], [0, 1]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]]}',
  });
  const error = h("p", { class: "error", id: "paste-error", role: "alert", hidden: true });
  const about = h(
    "p",
    { class: "hint", id: "paste-about" },
    "Cells of a spreadsheet or CSV, Python lists, printed arrays of numpy or torch, tensors by " +
      "name as JSON, the body of a request, or a curl command. A column of words gives labels. " +
      "One tensor is query, key and value at once; further ones are added to it. " +
      "The variant and the parameters of a request apply too.",
  );
  const form = h(
    "form",
    { method: "dialog" },
    h("h2", { id: "paste-title" }, "Your own tensors"),
    about,
    h(
      "div",
      { class: "field" },
      h("label", { for: "paste-text" }, "Tensors or request"),
      text,
      error,
    ),
    h(
      "div",
      { class: "row" },
      h("button", { class: "primary", value: "load" }, "Use these"),
      h("button", { type: "button", click: () => close("upload") }, "Upload files"),
      h("button", { type: "button", class: "quiet", click: () => close("") }, "Cancel"),
    ),
  );
  const dialog = h("dialog", { class: "box large", "aria-labelledby": "paste-title" }, form);
  const close = (result) => dialog.close(result);
  let cancel = null;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    try {
      onPaste(readText(text.value));
      close("load");
    } catch (problem) {
      setText(error, toSentence(problem.message));
      text.setAttribute("aria-invalid", "true");
      text.focus();
    }
  });
  dialog.addEventListener("close", () => {
    if (dialog.returnValue !== "load") cancel?.();
    if (dialog.returnValue === "upload") onUpload();
  });
  document.body.append(dialog);
  return (onCancel = null) => {
    cancel = onCancel;
    dialog.returnValue = "";
    setText(error, null);
    text.removeAttribute("aria-invalid");
    dialog.showModal();
    text.focus();
    text.select();
  };
}
