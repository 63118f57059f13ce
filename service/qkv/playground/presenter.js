// Switches the presenter view: large type, and the map beside the controls that change it.

import { findById } from "./dom.js";

const POPUPS = "dialog[open], .menu:popover-open, .tooltip:not([hidden])"; // Escape closes them first

/**
 * Creates the view.
 *
 * @param {HTMLButtonElement} button that switches it
 * @param {Object} state of the page: its `isPresenting`
 * @param {(fields: Object) => void} onChange called with the new fields of the state
 * @returns {() => void} shows the view that the state says
 */
export function createPresenter(button, state, onChange) {
  const show = () => {
    document.body.classList.toggle("presenting", state.isPresenting);
    button.setAttribute("aria-pressed", state.isPresenting);
    if (state.isPresenting) findById("parameters").closest("details").open = true;
  };
  const toggle = () => onChange({ isPresenting: !state.isPresenting });
  button.addEventListener("click", toggle);
  document.addEventListener("keydown", (event) => {
    const leaves = event.key === "Escape" && state.isPresenting && !event.defaultPrevented;
    const isShortcut = event.code === "KeyP" && event.altKey && !event.ctrlKey && !event.metaKey;
    if (!isShortcut && !(leaves && !document.querySelector(POPUPS))) return;
    event.preventDefault();
    toggle();
  });
  return show;
}
