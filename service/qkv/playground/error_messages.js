// What went wrong, said where it can be put right.

import { findById, setText } from "./dom.js";

/** Takes away what was said before. */
export function clearProblems() {
  setText(findById("alert"), null);
  setText(findById("inputs-error"), null);
  for (const field of document.querySelectorAll("[data-pointers]")) setError(field, null);
}

/**
 * Shows a problem beside the field that its JSON pointer names, or else above all.
 *
 * @param {Error} error a `Problem` of the service, or a fault of this page
 */
export function showProblem(error) {
  const detail = toSentence(error.detail ?? error.message);
  const field = error.pointer ? fieldFor(error.pointer) : null;
  if (field) {
    setError(field, detail);
    const details = field.closest("details");
    if (details) details.open = true;
    setText(findById("alert"), detail);
  } else if (error.pointer?.startsWith("/inputs")) {
    setText(findById("inputs-error"), detail);
    setText(findById("alert"), detail);
  } else {
    setText(findById("alert"), detail);
  }
}

/** The field that a pointer names, or the one around what it names. */
function fieldFor(pointer) {
  const fields = [...document.querySelectorAll("[data-pointers]")];
  const isWithin = (known) => pointer === known || pointer.startsWith(`${known}/`);
  return fields.find((field) => field.dataset.pointers.split(" ").some(isWithin)) ?? null;
}

function setError(field, detail) {
  let error = field.querySelector(".error");
  if (!error && !detail) return;
  if (!error) {
    error = document.createElement("p");
    error.className = "error";
    field.append(error);
  }
  setText(error, detail);
  field.classList.toggle("wrong", Boolean(detail));
  for (const input of field.querySelectorAll("input, select")) {
    if (detail) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }
}

const toSentence = (text) =>
  text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
