// The list of examples, with an entry for tensors of the user's own.

import { findById } from "../dom.js";
import { EXAMPLES } from "./examples.js";

/**
 * Fills the list, and listens to it.
 *
 * @param {Object} state of the page
 * @param {(example: Object) => void} onExample called with the chosen example
 * @param {(onCancel: () => void) => void} openPaste asks for tensors of the user's own
 */
export function createExampleList(state, onExample, openPaste) {
  const select = findById("example");
  const options = EXAMPLES.map(({ id, title }) => new Option(title, id));
  select.append(...options, new Option("Your own…", ""));
  select.addEventListener("change", () => {
    const example = EXAMPLES.find(({ id }) => id === select.value);
    if (example) return onExample(example);
    openPaste(() => {
      select.value = state.example ?? "";
    });
  });
}
