// Typesets formulas that are written as plain text: K^T, e^(s - m), S_(t-1), phi(q_i) . phi(k_j).

import { h } from "./dom.js";

const GLYPHS = { phi: "φ", beta: "β", sum: "Σ", ".": "·", "-": "−", "<=": "≤", "'": "′" };
const TOKENS =
  /([_^])(?:(\()([^()]*)(\))|([A-Za-z0-9]+))|\b(?:phi|beta)\b|\bsum(?=_)|(?<=^| )[.-](?= |$)|(?<=\w)-(?=1\b)|<=|(?<=\b[a-zA-Z])'/g;
const BASE = /(?:^|[^A-Za-z_])(?:[A-Za-z]|softmax|sum)$/; // key_lengths is a name

/**
 * Returns the nodes of a text whose formulas are typeset. What marks an exponent or an index stays
 * in the text, unseen: for screen readers, and to be copied.
 *
 * @param {string} text
 * @returns {Array<Node|string>}
 */
export function typeset(text) {
  const nodes = [];
  let end = 0;
  const add = (...more) => nodes.push(...more.filter(Boolean));
  for (const match of text.matchAll(TOKENS)) {
    const [whole, mark, opening, inside, closing, plain] = match;
    if (mark === "_" && !BASE.test(text.slice(0, match.index))) continue;
    add(text.slice(end, match.index));
    end = match.index + whole.length;
    if (!mark) add(GLYPHS[whole]);
    else {
      const [before, after] = [unseen(mark + (opening ?? "")), closing && unseen(closing)];
      add(before, h(mark === "^" ? "sup" : "sub", {}, ...typeset(inside ?? plain)), after);
    }
  }
  add(text.slice(end));
  return nodes;
}

const unseen = (text) => h("span", { class: "unseen" }, text);
