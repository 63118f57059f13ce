// Explains the terms of the page in tooltips, on hover, on focus and for screen readers.

import { findById, h, placeBeside } from "./dom.js";

const TERMS = {
  stochastic: "No weight is negative, and each row of weights sums to 1.",
  signed: "Weights can be negative, and rows need not sum to 1.",
  unnormalised: "Rows of weights need not sum to 1.",
  Symbols:
    "A weights, Q queries, K keys, V values.\n" +
    "L number of queries, S number of keys.\n" +
    "D channels of a query and a key, E channels of a value.\n" +
    "B items of the batch, H query heads, G key heads.",
  D: "D is the number of channels of a query and a key: the last axis of query.",
  S: "S is the number of keys: the second last axis of key.",
  Entropy:
    "How widely a row spreads its weight, in nats. It is 0 if one key has all the weight, " +
    "and ln S if all S keys have the same weight.",
  "Effective keys": "exp(entropy): this many keys with equal weights have the same entropy.",
  masked:
    "The query may not see this key: it is later, padding, or outside the window or the mask.",
  Cumulative: "Share of the row's weight on this key and the keys above it.",
  "Relative error":
    "Frobenius norm of the difference of the outputs, divided by the norm of the baseline's output.",
  "Largest error": "Largest absolute difference between elements of the two outputs.",
  Cosine: "Cosine of the angle between the two outputs. It is 1 if they have the same direction.",
  "Total variation":
    "Half the sum of absolute differences of two rows of weights. It is 0 if the rows are equal, " +
    "and 1 if they have no key in common.",
  "Jensen–Shannon":
    "Jensen–Shannon divergence of two rows of weights, in nats. It is symmetric, from 0 to " +
    "ln 2 = 0.693.",
  KL:
    "Kullback–Leibler divergence from the baseline's row to the variant's row, in nats. It is 0 if " +
    "the rows are equal. A dash means infinite or undefined. It is infinite if the variant gives " +
    "no weight to a key that the baseline uses, and undefined for negative weights.",
  "Rank correlation":
    "Spearman's correlation of the order of keys by weight. It is 1 if the order is the same.",
  Time: "Median time of one call on the device.",
  Flops: "Floating-point operations of one call.",
  "Peak memory": "Largest memory that one call allocates beside its inputs.",
};

const SYMBOLS = /\b([DS])\b/;
const HIDE_DELAY_MS = 150; // time for the pointer to reach the tooltip

/** Creates a button that shows what a term means; plain text if the term is unknown. */
export function createTerm(term) {
  if (!Object.hasOwn(TERMS, term)) return document.createTextNode(term);
  return h(
    "button",
    { type: "button", class: "term", "data-term": term, "aria-describedby": describeTerm(term) },
    term,
  );
}

/** Returns a text with a term for the first of its symbols. */
export function withSymbols(text) {
  const [before, symbol, ...after] = text.split(SYMBOLS);
  return symbol ? [before, createTerm(symbol), after.join("")] : [text];
}

/** Returns the id of a hidden element with the meaning of a term. */
function describeTerm(term) {
  const id = `term-${term.toLowerCase().replace(/\W+/g, "-")}`;
  if (!document.getElementById(id)) document.body.append(h("p", { id, hidden: true }, TERMS[term]));
  return id;
}

/** Shows the tooltip of the term under the pointer or with the focus; Escape hides it. */
export function listenToTerms() {
  const tooltip = h("p", { id: "tooltip", class: "tooltip", role: "tooltip", hidden: true });
  let timer = 0;
  let shown = null;
  const hide = () => {
    tooltip.hidden = true;
  };
  const termOf = ({ target }) => target.closest?.(".term, #tooltip");
  const show = (event) => {
    const element = termOf(event);
    if (!element) return;
    clearTimeout(timer);
    if (element === tooltip) return;
    tooltip.textContent = TERMS[element.dataset.term];
    tooltip.hidden = false;
    shown = element;
    placeBeside(tooltip, element);
  };
  const hideSoon = (event) => {
    clearTimeout(timer);
    if (termOf(event)) timer = setTimeout(hide, HIDE_DELAY_MS);
  };
  document.body.append(tooltip);
  findById("symbols").append(createTerm("Symbols"));
  for (const name of ["pointerover", "focusin", "click"]) document.addEventListener(name, show);
  for (const name of ["pointerout", "focusout"]) document.addEventListener(name, hideSoon);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  const follow = () => shown && placeBeside(tooltip, shown);
  document.addEventListener("scroll", follow, { capture: true, passive: true });
}
