// Lays out the page: which sections are folded, and the presenter view. Undo does not take it back.

import { findById } from "./dom.js";
import { createPresenter } from "./presenter.js";
import { createSections } from "./sections.js";

/**
 * Creates the layout.
 *
 * @param {Object} state of the page
 * @param {(change: () => void) => void} amend called with a change of the layout
 * @param {() => void} onPresent called when the presenter view has begun or ended
 */
export function createPageLayout(state, amend, onPresent) {
  const isNarrow = matchMedia("(max-width: 62rem)").matches; // there, the map is more important
  for (const part of document.querySelectorAll("form > details")) part.open = !isNarrow;
  const change = (fields) =>
    amend(() => {
      Object.assign(state, fields);
      show();
    });
  const sections = createSections(state, change);
  const showPresenter = createPresenter(findById("present"), state, (fields) => {
    change(fields);
    onPresent();
  });
  const show = () => {
    showPresenter();
    sections.show();
  };
  return { show, open: sections.open, whenOpen: sections.whenOpen };
}
