// Lists gradients and finite differences as a table, for screen readers and for exact numbers.

import { formatNumber, h } from "../dom.js";
import { entryName } from "./gradient_maps.js";

const MAX_ROWS = 256;
const HEADINGS = ["Entry", "Gradient", "Finite difference", "Difference"];

/**
 * Creates the table, which is filled while it is open.
 *
 * @param {HTMLElement} root
 * @returns {(tensors: Array<Object>) => void} shows the inputs of `createGradientMaps`
 */
export function createGradientTable(root) {
  const note = h("p", { class: "hint" });
  const area = h("div", {
    class: "scroll",
    tabindex: "0",
    role: "region",
    "aria-label": "Table of the gradients",
  });
  const summary = h("summary", {}, "Gradients as a table");
  const details = h("details", { toggle: () => fill() }, summary, area, note);
  let tensors = [];
  const fill = () => {
    if (!details.open) return;
    const entries = tensors.flatMap((tensor) =>
      Array.from(tensor.gradients.keys(), (at) => [tensor, at]),
    );
    const hidden = entries.length - MAX_ROWS;
    note.textContent = hidden > 0 ? `${hidden} more are not shown.` : "";
    area.replaceChildren(createTable(entries.slice(0, MAX_ROWS)));
  };
  root.append(details);
  return (newTensors) => {
    tensors = newTensors;
    fill();
  };
}

function createTable(entries) {
  const headings = HEADINGS.map((text) => h("th", { scope: "col" }, text));
  const rows = entries.map(([tensor, at]) => {
    const [gradient, quotient] = [tensor.gradients[at], tensor.quotients[at]];
    const isKnown = !Number.isNaN(quotient);
    const texts = [
      formatNumber(gradient),
      isKnown ? formatNumber(quotient) : "–",
      isKnown ? formatNumber(Math.abs(gradient - quotient), 2) : "–",
    ];
    const name = h("th", { scope: "row" }, entryName(tensor, at));
    return h("tr", {}, name, ...texts.map((text) => h("td", {}, text)));
  });
  return h(
    "table",
    { class: "numbers" },
    h("caption", { class: "unseen" }, "Gradients and finite differences"),
    h("thead", {}, h("tr", {}, ...headings)),
    h("tbody", {}, ...rows),
  );
}
