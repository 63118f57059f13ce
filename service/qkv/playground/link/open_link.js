// Opens a link: decides which state its fields, an example and kept tensors give together.

import { toSentence } from "../error_messages.js";
import { EXAMPLES } from "../inputs/examples.js";
import { exampleFor, NEW_TENSORS, NEW_VIEW, NO_REQUEST, stateOfExample } from "../page_state.js";
import { describeLeftOut } from "./copy_link.js";
import { isLink, parseLink } from "./page_link.js";

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
  const isOwn = !link.example && ("tensors" in link.fields || leftOut.length > 0);
  const example = link.example ?? exampleFor(link.fields.variant ?? [...variants.values()][0]);
  const before = isOwn
    ? { ...NEW_TENSORS, ...NO_REQUEST, tensors: [], example: null, parameters: {} }
    : stateOfExample(example, variants);
  const rest = kept && isOwn ? kept : kept && leftOut.includes("labels") ? pickLabels(kept) : {};
  const addressed = fragment && !isLink(fragment) ? { open: [fragment] } : {};
  const fields = { ...NEW_VIEW, ...addressed, ...before, ...link.fields, ...rest };
  if (!kept && leftOut.length) {
    const what = describeLeftOut(leftOut);
    const note = `This link does not hold ${what}: too large for a link. Load the same files again.`;
    return { fields, note, className: "note" };
  }
  return { fields, note: isOwn ? null : example.about, className: "hint" };
}

const pickLabels = ({ labels }) => ({ labels });
