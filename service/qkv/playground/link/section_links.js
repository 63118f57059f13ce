// Follows the links to sections of the page without a change of its address, which holds the state.

import { findById } from "../dom.js";

/**
 * Listens to the links.
 *
 * @param {(name: string) => void} onSection called before the page scrolls to a section
 */
export function listenToSectionLinks(onSection) {
  for (const link of document.querySelectorAll('a[href^="#"]')) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const section = findById(link.hash.slice(1));
      onSection(section.id);
      section.focus({ preventScroll: true });
      section.scrollIntoView();
    });
  }
}
