// Shows error messages beside the fields that they are about.

import { findById, setText } from "./dom.js";

/** Removes all error messages. */
export function clearProblems() {
  setText(findById("alert"), null);
  setText(findById("inputs-error"), null);
  for (const field of document.querySelectorAll("[data-pointers]")) setError(field, null);
}

/**
 * Shows an error above the weights, and beside the field that its JSON pointer names.
 *
 * @param {Error} error a `Problem` of the service, or an error of this page
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

/** Returns the field of a JSON pointer, or the field that contains it. */
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

/** Adds a full stop, and a capital letter if the message begins with a word, not with a name. */
export function toSentence(text) {
  const sentence = /^[a-z]+ /.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(sentence) ? sentence : `${sentence}.`;
}
