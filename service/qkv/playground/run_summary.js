// Describes runs in sentences: what is missing for one, and what one has computed.

import { findById, formatTime } from "./dom.js";
import { createTerm } from "./glossary.js";
import { describeStack, headName } from "./weights/head_grid.js";
import { outputIndex } from "./weights/heatmap_data.js";

/** Returns the message for a variant whose inputs are not complete. */
export function missingMessage(variant, names) {
  const [last, ...before] = [...names].reverse();
  const list = before.length ? `${before.reverse().join(", ")} and ${last}` : last;
  return `${variant} requires ${list}: upload ${names.length > 1 ? "them" : "it"} too`;
}

/** Describes the sizes and the time of a run. */
export function describeRun({ request, timing, weights }) {
  const queries = request.rows === 1 ? "1 query" : `${request.rows} queries`;
  const keys = request.cols === 1 ? "1 key" : `${request.cols} keys`;
  const heads = weights?.stack > 1 ? `, ${describeStack(weights)}` : "";
  const elapsed = formatTime(timing.total_ms);
  return `${request.variant.variant}: ${queries}, ${keys}${heads}; ${elapsed} in the service.`;
}

/** Describes the size of the output of a head. */
export function describeOutput(view, head) {
  const { stack, rows, cols } = view.output;
  const name = headName(outputIndex(view, head), view.output);
  return `${stack > 1 ? `${name} of ${stack}, ` : ""}${rows} × ${cols}`;
}

/** Shows the kind of the weights, a term of the glossary, beside their title. */
export function showKind(kind) {
  const element = findById("kind");
  if (element.textContent !== (kind ?? "")) element.replaceChildren(kind ? createTerm(kind) : "");
  element.hidden = !kind;
}
