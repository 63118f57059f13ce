// Sections that stay closed until the user or a link opens them. Only an open section that is in
// view sends requests.

import { findById } from "./dom.js";

/** The ids of these sections. Each has a `details` element. */
export const SECTIONS = ["steps", "gradients"];

const IN_VIEW = { rootMargin: "200px" }; // so near the window, the user sees it next

const detailsOf = (id) => findById(id).querySelector("details");

/** Opens and closes the sections as the state of the page says. */
export function showOpenSections({ open }) {
  for (const id of SECTIONS) detailsOf(id).open = open.includes(id);
}

/**
 * Listens to a section.
 *
 * @param {string} id
 * @param {Object} state of the page; its `open` has the ids of the open sections
 * @param {Object} callbacks
 * @param {() => void} callbacks.load called when the section is open and comes into view
 * @param {() => void} callbacks.onChange called when the user opened or closed it
 * @returns {() => void} calls `load` if the section is open and in view
 */
export function listenToSection(id, state, { load, onChange }) {
  const details = detailsOf(id);
  let isInView = false;
  const loadIfSeen = () => {
    if (details.open && isInView) load();
  };
  details.addEventListener("toggle", () => {
    if (details.open !== state.open.includes(id)) {
      const isOpen = (one) => (one === id ? details.open : state.open.includes(one));
      state.open = SECTIONS.filter(isOpen);
      onChange();
    }
    loadIfSeen();
  });
  new IntersectionObserver((entries) => {
    isInView = entries.at(-1).isIntersecting;
    loadIfSeen();
  }, IN_VIEW).observe(details);
  return loadIfSeen;
}
