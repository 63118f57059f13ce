// Asks before tensors replace those that the user brought. The page goes on meanwhile.

import { h, joinNames } from "../dom.js";

/**
 * Creates the question.
 *
 * @returns {{element, ask, focus, cancelFor}}
 *   ask: (names, replaced, tensors, canKeep) => a promise of "replace", "keep", or null for neither
 *   focus: moves the focus to an open question
 *   cancelFor: cancels a question about other tensors than these
 */
export function createReplaceQuestion() {
  const text = h("p", { id: "replace-text" });
  const answer = (value) => () => close(value);
  const button = (value, title, attributes = {}) =>
    h("button", { type: "button", ...attributes, click: answer(value) }, title);
  const keepButton = button("keep", "Keep both");
  const element = h(
    "div",
    {
      class: "question",
      role: "group",
      tabindex: "-1",
      "aria-labelledby": "replace-text",
      hidden: true,
      keydown: ({ key }) => key === "Escape" && close(null),
    },
    text,
    h(
      "div",
      { class: "row" },
      button("replace", "Replace"),
      keepButton,
      button(null, "Cancel", { class: "quiet" }),
    ),
  );
  let asked = null; // {tensors, resolve}

  const focus = () => {
    if (!asked) return;
    element.closest("details").open = true;
    element.focus();
    element.scrollIntoView({ block: "nearest" });
  };
  const close = (value) => {
    const { resolve } = asked;
    asked = null;
    element.hidden = true;
    resolve(value);
  };
  const ask = (names, replaced, tensors, canKeep) => {
    const isSame = names.join() === replaced.join();
    text.textContent = isSame
      ? `The new ${joinNames(names)} would replace the ${names.length > 1 ? "ones" : "one"} that you brought.`
      : `${joinNames(names)} would replace ${joinNames(replaced)}, which you brought.`;
    keepButton.hidden = !canKeep;
    element.hidden = false;
    return new Promise((resolve) => {
      asked = { tensors, resolve };
      focus();
    });
  };
  return {
    element,
    ask,
    focus,
    cancelFor: (tensors) => asked && asked.tensors !== tensors && close(null),
  };
}
