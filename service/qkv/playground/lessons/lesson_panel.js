// The lessons: their list at the top of the page, and the text of the stop that the page shows.

import { findById, h } from "../dom.js";
import { typeset } from "../typeset.js";
import { findPlace, LESSONS } from "./lesson_list.js";

const MARK = "looked-at";
const KEYS = { ArrowLeft: "before", ArrowRight: "after" };

/**
 * Creates the list and the panel with the text.
 *
 * @param {Object} state of the page; `lesson` is null when the user has closed a lesson
 * @param {Object} callbacks
 * @param {(fragment: string) => void} callbacks.onStop called with the link to the stop that the user
 *   goes to
 * @param {() => void} callbacks.onClose called when the user has closed a lesson
 * @param {(settings: Object|null) => void} callbacks.onMeasure called with the sweep that a stop
 *   starts, or null when the user leaves it
 */
export function createLessonPanel(state, { onStop, onClose, onMeasure }) {
  let shown = null; // the place of the stop, from findPlace
  let isNew = false; // the section of the stop is not yet in view

  const show = (lesson) => {
    if (shown?.id === lesson?.id && shown?.stop === lesson?.stop) return;
    if (shown) onMeasure(null);
    shown = lesson && findPlace(lesson);
    isNew = Boolean(shown);
    keepInView(null);
    list.mark(shown?.id);
    root.hidden = !shown;
    if (shown) fillParts(parts, shown);
  };
  const go = ({ id, stop }) => {
    const isOther = id !== shown?.id;
    const wasBack = document.activeElement === parts.back;
    onStop(`lesson=${id}&stop=${stop}`);
    if (isOther) parts.title.focus({ preventScroll: true });
    else if (wasBack && parts.back.disabled) parts.next.focus();
  };
  const close = () => {
    const { id } = shown;
    state.lesson = null;
    show(null);
    list.focus(id);
    onClose();
  };
  const root = findById("lesson");
  const list = createList(findById("lessons"), (id) => go({ id, stop: 1 }));
  const parts = createParts(root, {
    back: () => go(shown.before),
    next: () => (shown.after ? go(shown.after) : close()),
    close,
  });
  const keepInView = createKeeper();
  listenToKeys(root, (side) => shown?.[side] && go(shown[side]));
  keepHeight(root);

  return {
    /** Shows the text of a stop; null shows no lesson. */
    show,
    /** Brings the section of the stop into view again, in another layout. */
    bringBack: () => shown && keepInView(shown.content),
    /** Brings the section of a new stop into view: called when the page has drawn its state. */
    arrive: () => {
      if (!isNew) return;
      isNew = false;
      const { content } = shown;
      keepInView(content);
      if (content.measure) onMeasure(content.measure);
    },
  };
}

/** Creates the list of lessons; returns functions that mark and focus one. */
function createList(root, onOpen) {
  const createLink = ({ id, title, purpose }) => {
    const open = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return; // another tab or window
      event.preventDefault(); // the page makes the entry of the history
      onOpen(id);
    };
    return h("a", { href: `/#lesson=${id}&stop=1`, title: purpose, click: open }, title);
  };
  const links = new Map(LESSONS.map((lesson) => [lesson.id, createLink(lesson)]));
  root.append(
    h("h2", { id: "lessons-title" }, "Lessons"),
    h("ol", {}, ...[...links.values()].map((link) => h("li", {}, link))),
  );
  return {
    focus: (id) => links.get(id).focus(),
    mark: (id) => {
      for (const [name, link] of links) {
        if (name === id) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    },
  };
}

function createParts(root, { back, next, close }) {
  const button = (click, text, attributes) =>
    h("button", { type: "button", click, ...attributes }, text);
  const parts = {
    title: h("h2", { id: "lesson-title", tabindex: "-1" }),
    place: h("span", { class: "hint" }),
    text: h("p"),
    back: button(back, "Back"),
    next: button(next, "Next", { class: "primary" }),
  };
  root.append(
    h(
      "header",
      {},
      parts.title,
      parts.place,
      button(close, "×", { class: "quiet", "aria-label": "Close the lesson" }),
    ),
    h("div", { "aria-live": "polite" }, parts.text),
    h("div", { class: "steps" }, parts.back, parts.next),
  );
  return parts;
}

function fillParts(parts, { lesson, stop, content, before, after }) {
  const isLast = stop === lesson.stops.length;
  parts.title.textContent = lesson.title;
  parts.place.textContent = `${stop} of ${lesson.stops.length}`;
  parts.text.replaceChildren(...typeset(content.text));
  parts.back.disabled = !before;
  parts.next.textContent = !isLast ? "Next" : after ? "Next lesson" : "Close";
}

/** Calls back for the arrow keys in the panel, and on the page where nothing has the focus. */
function listenToKeys(root, onSide) {
  document.addEventListener("keydown", (event) => {
    const isFree = event.target === document.body || root.contains(event.target);
    const isPlain = !event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey;
    if (event.key in KEYS && isFree && isPlain) onSide(KEYS[event.key]);
  });
}

/** Keeps the height of the panel in a property that the style sheet uses. */
function keepHeight(root) {
  new ResizeObserver(() => {
    document.documentElement.style.setProperty("--lesson-height", `${root.offsetHeight}px`);
  }).observe(root);
}

/**
 * Returns a function that brings the section of a stop into view and marks what its text is about;
 * null marks nothing. Results above it may come later and move it: it stays in view until the user
 * scrolls, clicks or types.
 */
function createKeeper() {
  let kept = null;
  const main = document.querySelector("main");
  const bringBack = () => kept && bringIntoView(kept);
  new ResizeObserver(bringBack).observe(main);
  new MutationObserver(bringBack).observe(main, { childList: true, subtree: true });
  for (const type of ["wheel", "touchmove", "pointerdown", "keydown"]) {
    addEventListener(type, () => (kept = null), { passive: true, capture: true });
  }
  return (content) => {
    kept = content;
    for (const one of document.querySelectorAll(`.${MARK}`)) one.classList.remove(MARK);
    if (content) bringIntoView(content);
  };
}

function bringIntoView({ section, look }) {
  const behavior = "instant"; // the second call would stop a smooth first one
  findById(`${section}-title`).closest("section").scrollIntoView({ behavior });
  for (const element of look ? document.querySelectorAll(look) : []) {
    element.classList.add(MARK); // those that are on their way are marked when they come
    const closed = element.closest("details:not([open])");
    if (closed) closed.open = true;
    element.scrollIntoView({ block: "nearest", behavior });
  }
}
