// The sections that explain a run: its steps and its gradients.

import { createGradientsPanel } from "./gradients/gradients_panel.js";
import { createStepsPanel } from "./steps/steps_panel.js";

/**
 * Creates both sections. Each requests its content while it is open.
 *
 * @param {Object} state of the page
 * @param {Object} layout from `createPageLayout`
 * @param {Object} callbacks
 * @param {(row: number) => void} callbacks.onRow called with the row that the user chose
 * @param {() => void} callbacks.onChange called when the state of the page changed
 * @param {(call: Object) => void} callbacks.onCall called for each request
 * @param {(purpose: string, request: {path, body}) => void} callbacks.onRequest called with each
 *   request of gradients
 * @param {(text: string) => void} callbacks.announce
 */
export function createDetailSections(state, layout, { onRow, onRequest, ...callbacks }) {
  const steps = createStepsPanel(state, layout, { ...callbacks, onRow });
  const gradients = createGradientsPanel(state, {
    ...callbacks,
    onRequest: (request) => onRequest("gradients", request),
  });
  return {
    draw: (view) => {
      steps.show(view);
      gradients.show(view);
      layout.whenOpen("gradients", gradients.load);
    },
    clear: () => [steps, gradients].forEach((one) => one.clear()),
    repaint: () => gradients.repaint(),
    follow: steps.follow,
  };
}
