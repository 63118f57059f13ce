// Opens a link: decides which state its fields, an example and kept tensors give together.

import { toSentence } from "../error_messages.js";
import { EXAMPLES } from "../inputs/examples.js";
import { exampleFor, NEW_TENSORS, NEW_VIEW, NO_REQUEST, stateOfExample } from "../page_state.js";
import { describeLeftOut } from "./copy_link.js";
import { formatFields, isLink, parseLink } from "./page_link.js";

/**
 * Returns the state that a fragment describes, with a note for the user.
 *
 * @param {string} fragment without #; empty, or the name of a section to open: the state of the
 *   page's first example
 * @param {Object|null} kept fields that are too large for a fragment, if this browser has them
 * @param {Map<string, Object>} variants the catalogue
 * @returns {{fields: Object, note: string|null, className: string}}
 */
export function openLink(fragment, kept, variants) {
  let link;
  try {
    link = parseLink(fragment, variants);
  } catch (error) {
    const fields = { ...NEW_VIEW, ...stateOfExample(EXAMPLES[0], variants) };
    const note = `${toSentence(error.message)} This is an example instead.`;
    return { fields, note, className: "error" };
  }
  const { leftOut } = link;
  const isOwn = isOfUser(link);
  const example = isOwn ? null : findExample(link, variants);
  const rest = kept && isOwn ? kept : kept && leftOut.includes("labels") ? pickLabels(kept) : {};
  const fields = { ...createFields(link, example, variants), ...rest };
  if (fragment && !isLink(fragment)) fields.open = [fragment];
  if (fields.lesson) fields.lesson.fragment = formatStop(fields.lesson, variants);
  if (!kept && leftOut.length) {
    const what = describeLeftOut(leftOut);
    const note = `This link does not hold ${what}: too large for a link. Load the same files again.`;
    return { fields, note, className: "note" };
  }
  return { fields, note: isOwn ? null : example.about, className: "hint" };
}

/** True if the tensors of a link are the user's. */
const isOfUser = ({ example, fields, leftOut }) =>
  !example && ("tensors" in fields || leftOut.length > 0);

const findExample = ({ example, fields }, variants) =>
  example ?? exampleFor(fields.variant ?? [...variants.values()][0]);

/** Returns the state of a link; `example`: null if the tensors are the user's. */
function createFields({ fields }, example, variants) {
  const before = example
    ? stateOfExample(example, variants)
    : { ...NEW_TENSORS, ...NO_REQUEST, tensors: [], example: null, parameters: {} };
  return { ...NEW_VIEW, ...before, ...fields };
}

/** Returns the fragment of the state that a stop of a lesson sets. */
function formatStop({ id, stop }, variants) {
  const link = parseLink(`lesson=${id}&stop=${stop}`, variants);
  const example = isOfUser(link) ? null : findExample(link, variants);
  return formatFields(createFields(link, example, variants)).fragment;
}

const pickLabels = ({ labels }) => ({ labels });
