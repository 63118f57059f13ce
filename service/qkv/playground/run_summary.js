// Describes runs in sentences: what is missing for one, and what one has computed.

import { findById, formatTime, joinNames, setText } from "./dom.js";
import { createTerm } from "./glossary.js";
import { matchLabels } from "./inputs/labels.js";
import { inputsFor } from "./inputs/request_inputs.js";
import { describeStack, headName } from "./weights/head_grid.js";
import { outputIndex } from "./weights/heatmap_data.js";

/** Returns the message for a variant whose inputs are not complete. */
export function missingMessage(variant, names) {
  return `${variant} requires ${joinNames(names)}: upload ${names.length > 1 ? "them" : "it"} too`;
}

/** Describes the sizes and the time of a run. */
export function describeRun({ request, timing, weights }) {
  const queries = request.rows === 1 ? "1 query" : `${request.rows} queries`;
  const keys = request.cols === 1 ? "1 key" : `${request.cols} keys`;
  const heads = weights?.stack > 1 ? `, ${describeStack(weights)}` : "";
  const elapsed = formatTime(timing.total_ms);
  return `${request.variant.variant}: ${queries}, ${keys}${heads}; ${elapsed} in the service.`;
}

/** Describes the random inputs of variants, whose map says nothing of a model; null if none. */
export function describeRandomInputs({ tensors, layer }, variants) {
  const notes = [];
  const isSent = (variant, tensor) =>
    Object.values(inputsFor(tensors, variant, layer)).includes(tensor);
  const isRandom = ({ tensor, isRandom: own }) =>
    own && variants.some((variant) => isSent(variant, tensor));
  if (tensors.some(isRandom)) {
    notes.push("The hidden states x are random. Upload those of a text to see its map.");
  }
  for (const variant of variants) {
    const sent = inputsFor(tensors, variant, layer);
    const drawn = Object.entries(variant.inputs)
      .filter(([name, { random }]) => random && !(name in sent))
      .map(([name]) => name);
    if (!drawn.length) continue;
    const verb = drawn.length > 1 ? "are" : "is";
    notes.push(`${joinNames(drawn)} of ${variant.variant} ${verb} random: the request has none.`);
  }
  return notes.join(" ") || null;
}

/** Describes the size of the output of a head. */
function describeOutput(view, head) {
  const { stack, rows, cols } = view.output;
  const name = headName(outputIndex(view, head), view.output);
  return `${stack > 1 ? `${name} of ${stack}, ` : ""}${rows} × ${cols}`;
}

/** Shows the kind of the weights, a term of the glossary, and the head of a captured model. */
function showKind({ kind, weights }, head) {
  const element = findById("kind");
  if (element.textContent !== (kind ?? "")) element.replaceChildren(kind ? createTerm(kind) : "");
  element.hidden = !kind;
  setText(findById("place"), weights?.place ? headName(head, weights) : null);
}

/** Shows what the maps of a view are of, and what is odd about their inputs. */
export function showNotes(view, state) {
  const { rows, cols, variant } = view.request;
  showKind(view, state.head);
  setText(findById("labels-note"), matchLabels(state.labels, rows, cols).note);
  setText(findById("random-note"), describeRandomInputs(state, [variant]));
  setText(findById("output-about"), describeOutput(view, state.head));
}
