// Folds the sections of the results behind their headings: those with data-folded in every window,
// and all of them in a narrow window and in the presenter view.

import { h } from "./dom.js";

const NARROW = matchMedia("(max-width: 34rem)");

/** Names of the sections that are open at first even where room is scarce. */
const MAIN = ["captured", "weights"];

/**
 * Creates the folding of all sections. The name of a section is the id of its heading without -title.
 *
 * @param {Object} state of the page: its `open` and `closed` have the names of the sections that the
 *   user has unfolded and folded
 * @param {(fields: Object) => void} onChange called with the new fields of the state
 */
export function createSections(state, onChange) {
  const isFoldable = ({ isFolded }) => isFolded || NARROW.matches || state.isPresenting;
  const isOpen = (section) => {
    const { name, isFolded } = section;
    if (!isFoldable(section)) return true;
    if (state.open.includes(name) || state.closed.includes(name)) return state.open.includes(name);
    return !isFolded && MAIN.includes(name);
  };
  const toggle = (section) => {
    const others = (names) => names.filter((one) => one !== section.name);
    const [open, closed] = [others(state.open), others(state.closed)];
    (isOpen(section) ? closed : open).push(section.name);
    onChange({ open, closed });
  };
  const sections = new Map();
  const show = () => {
    for (const section of sections.values()) section.show(isFoldable(section), isOpen(section));
  };
  for (const element of document.querySelectorAll("main section")) {
    const section = createSection(element, () => toggle(section));
    sections.set(section.name, section);
  }
  NARROW.addEventListener("change", show);
  show();
  return {
    /** Folds and unfolds as the state says. */
    show,
    /** Unfolds a section. */
    open: (name) => isOpen(sections.get(name)) || toggle(sections.get(name)),
    /** Calls back once while the section is open: now, or when the user unfolds it. */
    whenOpen: (name, callback) => sections.get(name).whenOpen(callback),
  };
}

function createSection(element, onToggle) {
  const title = element.querySelector("h2");
  const button = h("button", { type: "button", class: "fold", click: onToggle });
  let waiting = null;
  const callBack = () => {
    if (element.classList.contains("folded")) return;
    waiting?.();
    waiting = null;
  };
  return {
    name: title.id.replace("-title", ""),
    isFolded: "folded" in element.dataset,
    show: (isFoldable, isOpen) => {
      if (isFoldable && !button.isConnected) {
        button.append(...title.childNodes);
        title.append(button);
      }
      if (!isFoldable && button.isConnected) title.replaceChildren(...button.childNodes);
      button.setAttribute("aria-expanded", isOpen);
      element.classList.toggle("folded", !isOpen);
      callBack();
    },
    whenOpen: (callback) => {
      waiting = callback;
      callBack();
    },
  };
}
