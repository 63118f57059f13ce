// The sections that explain a run: its steps and its gradients.

import { createGradientsPanel } from "./gradients/gradients_panel.js";
import { createStepsPanel } from "./steps/steps_panel.js";

/**
 * Creates both sections.
 *
 * @param {Object} state of the page
 * @param {Object} callbacks
 * @param {(row: number) => void} callbacks.onRow called with the row that the user chose
 * @param {() => void} callbacks.onChange called when the state of the page changed
 * @param {(call: Object) => void} callbacks.onCall called for each request
 * @param {(purpose: string, request: {path, body}) => void} callbacks.onRequest called with each
 *   request of gradients
 * @param {(text: string) => void} callbacks.announce
 */
export function createDetailSections(state, { onRow, onChange, onCall, onRequest, announce }) {
  const steps = createStepsPanel(state, { onRow, onChange, onCall });
  const gradients = createGradientsPanel(state, {
    onChange,
    onCall,
    onRequest: (request) => onRequest("gradients", request),
    announce,
  });
  return {
    draw: (view) => [steps, gradients].forEach((one) => one.draw(view)),
    clear: () => [steps, gradients].forEach((one) => one.clear()),
    repaint: () => [steps, gradients].forEach((one) => one.repaint()),
    follow: steps.follow,
  };
}
