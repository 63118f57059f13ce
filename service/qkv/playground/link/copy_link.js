// The button that copies a link to the state of the page.

import { findById, joinNames, setText } from "../dom.js";

const WHAT = { tensors: "the tensors", labels: "the labels", layer: "the layer" };

/** Names the fields that a link leaves out. */
export function describeLeftOut(leftOut) {
  return joinNames(leftOut.map((name) => WHAT[name] ?? name));
}

/**
 * Listens to the button.
 *
 * @param {() => {address: string, leftOut: string[]}} createLink
 */
export function listenToCopyLink(createLink) {
  const button = findById("copy-link");
  const note = findById("link-note");
  button.addEventListener("click", async () => {
    const { address, leftOut } = createLink();
    const rest = leftOut.length
      ? ` It does not hold ${describeLeftOut(leftOut)}: too large for a link.`
      : "";
    try {
      await navigator.clipboard.writeText(address);
      button.textContent = "Copied";
      setText(note, rest && `The link is copied.${rest}`);
    } catch {
      // the clipboard needs https or localhost
      setText(note, `Copy the link from the address bar of the browser.${rest}`);
    }
    setTimeout(() => (button.textContent = "Copy link"), 1500);
  });
}
