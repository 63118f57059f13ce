// How long the last calls took, and with what.

import { h, time } from "./dom.js";

const SHOWN = 5;
const PARTS = [
  ["queue", "Queue", ({ queue_ms: ms }) => ms],
  ["transfer", "Transfer", ({ transfer_ms: ms }) => ms],
  ["compute", "Compute", ({ compute_ms: ms }) => ms],
  ["rest", "Rest", (t) => t.total_ms - t.queue_ms - t.transfer_ms - t.compute_ms],
];

/**
 * The list of calls.
 *
 * @param {HTMLElement} root
 * @returns {(call: {variant, what, timing, took}) => void} called for each
 */
export function timings(root) {
  const list = h("ol", { class: "calls", reversed: true });
  const key = PARTS.map(([part, title]) =>
    h("li", {}, h("span", { class: `swatch ${part}` }), title),
  );
  root.append(h("ul", { class: "swatches", "aria-label": "Colours" }, ...key), list);
  const calls = [];
  return (call) => {
    calls.unshift(call);
    calls.splice(SHOWN);
    const longest = Math.max(...calls.map(({ timing }) => timing.total_ms));
    list.replaceChildren(...calls.map((one) => item(one, longest)));
  };
}

function item({ variant, what, timing, took }, longest) {
  const bar = h("div", { class: "stack", "aria-hidden": "true" });
  const said = [];
  for (const [part, title, of] of PARTS) {
    const ms = Math.max(of(timing), 0);
    const piece = h("span", { class: part });
    piece.style.width = `${(100 * ms) / longest}%`;
    bar.append(piece);
    said.push(`${title.toLowerCase()} ${time(ms)}`);
  }
  return h(
    "li",
    {},
    h(
      "div",
      { class: "line" },
      h("span", {}, h("strong", {}, variant), ` ${what}`),
      h("span", {}, time(timing.total_ms)),
    ),
    bar,
    h("p", { class: "hint" }, said.join(" · ")),
    h(
      "p",
      { class: "hint" },
      `batch of ${timing.batch_size} · ${timing.device} · ${timing.backend} · ${time(took)} to here and back`,
    ),
  );
}
