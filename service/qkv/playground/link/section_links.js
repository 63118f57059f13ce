// Follows the links to sections of the page without a change of its address, which holds the state.

import { findById } from "../dom.js";

/** Listens to the links. */
export function listenToSectionLinks() {
  for (const link of document.querySelectorAll('a[href^="#"]')) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const section = findById(link.hash.slice(1));
      section.focus({ preventScroll: true });
      section.scrollIntoView();
    });
  }
}
