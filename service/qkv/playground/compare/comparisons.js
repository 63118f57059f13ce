// Creates the panels that compare variants: difference of weights, metrics, and time by length.

import { findById } from "../dom.js";
import { createComparePanel } from "./compare_panel.js";
import { createSweepPanel } from "./sweep_panel.js";
import { createDifferencePanel } from "./weights_difference.js";

/**
 * Creates the panels.
 *
 * @param {Object} state of the page
 * @param {Object} callbacks
 * @param {(call: Object) => void} callbacks.onCall called for each request of weights
 * @param {Function} callbacks.onPoint called for the cursor of the difference map
 * @param {() => void} callbacks.onChange called when the user chose variants or columns
 * @param {(purpose: string, request: {path, body}) => void} callbacks.onRequest called with each
 *   comparison and sweep
 * @param {(text: string) => void} callbacks.announce
 */
export function createComparisons(state, { onCall, onPoint, onChange, onRequest, announce }) {
  const difference = createDifferencePanel(findById("difference"), state, {
    onCall,
    onPoint,
    onChoose: onChange,
  });
  const metrics = createComparePanel(findById("comparison"), state, {
    onRequest: (body) => onRequest("comparison", { path: "/v1/compare", body }),
    onChoose: onChange,
  });
  const sweep = createSweepPanel(findById("sweep"), state, {
    announce,
    onRequest: (body) => onRequest("sweep", { path: "/v1/sweep", body }),
  });
  let compared = null; // a promise of the last comparison
  return {
    /** Shows the variants of the catalogue. */
    start: () => sweep.update(),
    /** Compares the run of a view with other variants. */
    update: (view) => {
      compared = Promise.all([difference.update(view), metrics.update(view.request)]);
    },
    /** Starts a sweep with these settings, behind the page's own requests; null stops it. */
    measure: (settings) => sweep.measure(settings, compared),
    /** Draws the difference for another head or other labels. */
    draw: () => difference.draw(),
    repaint: () => difference.map.repaint(),
  };
}
