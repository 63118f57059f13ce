// The selector of the example, with its description below.

import { findById, setText } from "../dom.js";
import { EXAMPLES } from "./examples.js";

/**
 * Fills the selector.
 *
 * @param {Object} callbacks
 * @param {(example: Object) => void} callbacks.onExample called with the chosen example
 * @param {(onCancel: () => void) => void} callbacks.onOwn called when the user chose to bring tensors
 * @returns {(id: string|null, about: string|null, className: string) => void} shows an example, or
 *   null for the user's own tensors, with a text about them
 */
export function createExampleSelect({ onExample, onOwn }) {
  const select = findById("example");
  const description = findById("example-about");
  const options = EXAMPLES.map(({ id, title }) => new Option(title, id));
  select.replaceChildren(...options, new Option("Your own…", ""));
  let shown = null;
  const show = (id) => {
    shown = id;
    select.value = id ?? "";
  };
  select.addEventListener("change", () => {
    const example = EXAMPLES.find(({ id }) => id === select.value);
    if (example) onExample(example);
    else onOwn(() => show(shown));
  });
  return (id, about, className) => {
    show(id);
    setText(description, about);
    description.className = className;
  };
}
