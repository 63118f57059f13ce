// What went wrong, said where it can be put right.

import { find, say } from "./dom.js";

/** Takes away what was said before. */
export function clearProblems() {
  say(find("alert"), null);
  say(find("inputs-error"), null);
  for (const field of document.querySelectorAll("[data-pointers]")) mark(field, null);
}

/**
 * Shows a problem beside the field that its JSON pointer names, or else above all.
 *
 * @param {Error} error a `Problem` of the service, or a fault of this page
 */
export function showProblem(error) {
  const detail = sentence(error.detail ?? error.message);
  const field = error.pointer ? fieldOf(error.pointer) : null;
  if (field) {
    mark(field, detail);
    const details = field.closest("details");
    if (details) details.open = true;
    say(find("alert"), detail);
  } else if (error.pointer?.startsWith("/inputs")) {
    say(find("inputs-error"), detail);
    say(find("alert"), detail);
  } else {
    say(find("alert"), detail);
  }
}

/** The field that a pointer names, or the one around what it names. */
function fieldOf(pointer) {
  const fields = [...document.querySelectorAll("[data-pointers]")];
  const within = (known) => pointer === known || pointer.startsWith(`${known}/`);
  return fields.find((field) => field.dataset.pointers.split(" ").some(within)) ?? null;
}

function mark(field, detail) {
  let error = field.querySelector(".error");
  if (!error && !detail) return;
  if (!error) {
    error = document.createElement("p");
    error.className = "error";
    field.append(error);
  }
  say(error, detail);
  field.classList.toggle("wrong", Boolean(detail));
  for (const input of field.querySelectorAll("input, select")) {
    if (detail) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
