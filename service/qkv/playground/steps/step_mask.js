// Finds the numbers of a step that belong to keys which a query does not see.

import { sliceStep } from "./step_slices.js";

/**
 * Returns a function of a step that returns a function of an index of its head: true if the query
 * does not see the key. Only the masked scores and the steps after them have such numbers.
 *
 * @param {Array<Object>} steps from `fetchSteps`
 * @param {Object} place as for `sliceStep`
 */
export function findMasked(steps, place) {
  const none = () => false;
  const first = steps.findIndex(({ name }) => name === "masked");
  if (first < 0) return () => none;
  const { head: scores } = sliceStep(steps[first], place);
  return (step) => {
    const { letters, shape } = step;
    const keys = letters.indexOf("S");
    if (steps.indexOf(step) < first || keys < 1 || letters[keys - 1] !== "L") return none;
    const inner = shape.slice(keys + 1).reduce((product, size) => product * size, 1);
    return (at) => scores[Math.floor(at / inner)] === -Infinity;
  };
}
