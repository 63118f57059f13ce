// Lists the last requests with their times, the run of the user first.

import { formatTime, h } from "./dom.js";

const MAX_CALLS = 5;
const PARTS = [
  ["queue", "Queue", ({ queue_ms: ms }) => ms],
  ["transfer", "Transfer", ({ transfer_ms: ms }) => ms],
  ["compute", "Compute", ({ compute_ms: ms }) => ms],
  ["rest", "Rest", (t) => t.total_ms - t.queue_ms - t.transfer_ms - t.compute_ms],
];

/**
 * Creates the list of requests.
 *
 * @param {HTMLElement} root
 * @returns {(call: {variant, what, timing, elapsedMs, isRun}) => void} adds one request; `isRun`: it
 *   is the run of the user, not one for statistics or differences
 */
export function createTimingList(root) {
  const list = h("ol", { class: "calls" });
  const key = PARTS.map(([part, title]) =>
    h("li", {}, h("span", { class: `swatch ${part}` }), title),
  );
  root.append(h("ul", { class: "swatches", "aria-label": "Colours" }, ...key), list);
  const calls = [];
  return (call) => {
    if (call.isRun) calls.unshift(call);
    else calls.splice(calls[0]?.isRun ? 1 : 0, 0, call);
    calls.splice(MAX_CALLS);
    const longest = Math.max(...calls.map(({ timing }) => timing.total_ms));
    list.replaceChildren(...calls.map((one) => createItem(one, longest)));
  };
}

function createItem({ variant, what, timing, elapsedMs }, longest) {
  const bar = h("div", { class: "stack", "aria-hidden": "true" });
  const descriptions = [];
  for (const [part, title, of] of PARTS) {
    const ms = Math.max(of(timing), 0);
    const segment = h("span", { class: part });
    segment.style.width = `${(100 * ms) / longest}%`;
    bar.append(segment);
    descriptions.push(`${title.toLowerCase()} ${formatTime(ms)}`);
  }
  return h(
    "li",
    {},
    h(
      "div",
      { class: "line" },
      h("span", {}, h("strong", {}, variant), ` ${what}`),
      h("span", {}, formatTime(timing.total_ms)),
    ),
    bar,
    h("p", { class: "hint" }, descriptions.join(" · ")),
    h(
      "p",
      { class: "hint" },
      `batch size ${timing.batch_size} · ${timing.device} · ${timing.backend} · ${formatTime(elapsedMs)} round trip`,
    ),
  );
}
