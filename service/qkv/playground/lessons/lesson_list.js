// The lessons, in their order.
//
// A lesson has an id, a title, its purpose in one line, and stops. A stop is a state of the page:
//   state: the fields of the state, as in the fragment of an address
//   section: name of the section to show, which is the id of its heading without -title
//   look: selector of the elements that the text is about, or absent
//   measure: the settings of a sweep that the stop starts, or absent
//   text: two sentences, whose numbers are those that the page shows

import { approximations } from "./approximations.js";
import { attention } from "./attention.js";
import { causal } from "./causal.js";
import { decoding } from "./decoding.js";
import { gradients } from "./gradients.js";
import { heads } from "./heads.js";
import { linear } from "./linear.js";
import { positions } from "./positions.js";

export const LESSONS = [
  attention,
  heads,
  positions,
  causal,
  linear,
  approximations,
  gradients,
  decoding,
];

/** Returns a stop of a lesson, counted from 1; undefined if there is none. */
export const findStop = ({ id, stop }) => findLesson(id)?.stops[stop - 1];

/**
 * Returns a stop with its lesson and its neighbours: {id, stop, lesson, content, before, after}.
 * `before` is null at the first stop of a lesson, `after` at the last stop of the last lesson.
 */
export function findPlace({ id, stop }) {
  const lesson = findLesson(id);
  const following = LESSONS[LESSONS.indexOf(lesson) + 1];
  const isLast = stop === lesson.stops.length;
  return {
    id,
    stop,
    lesson,
    content: lesson.stops[stop - 1],
    before: stop > 1 ? { id, stop: stop - 1 } : null,
    after: !isLast ? { id, stop: stop + 1 } : following ? { id: following.id, stop: 1 } : null,
  };
}

const findLesson = (id) => LESSONS.find((lesson) => lesson.id === id);
