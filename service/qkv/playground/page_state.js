// The state of the page: what its controls hold, and what an example sets.

import { EXAMPLES, findExample } from "./inputs/examples.js";
import { missingInputs } from "./inputs/request_inputs.js";

/**
 * Fields of the tensors. `entry`: the row and channel of the output whose gradients are shown, null:
 * the default one. `place`: that of a head of a captured model.
 */
export const NEW_TENSORS = { labels: [], head: 0, selectedRow: null, entry: null, place: null };

/** Fields of a pasted request. */
export const NO_REQUEST = { layer: null, dtype: null, pool: null };

/** Fields of the view, which stay when the tensors change. */
export const NEW_VIEW = {
  usesRoot: false, // shades of the map
  difference: null, // name of the variant of the difference map; null: the default one
  baseline: null, // name of the variant that others are compared with; null: the default one
  excluded: [], // names of the variants that are not compared
  showsAllMetrics: false, // all columns of the table of metrics
  isPresenting: false, // the presenter view
  open: [], // names of the sections that the user unfolded
  closed: [], // names of those that the user folded
  lesson: null, // the stop of a lesson: {id, stop, fragment}
};

/** Creates the state of a page without tensors. */
export const createState = () => ({
  ...NEW_TENSORS,
  ...NO_REQUEST,
  ...NEW_VIEW,
  variants: new Map(),
  variant: null,
  tensors: [],
  layerError: null, // of a layer of a checkpoint that cannot be sent
  parameters: {},
  example: null, // id of the example, null for other tensors
});

/**
 * Returns the fields that an example sets.
 *
 * @param {Object} example
 * @param {Map<string, Object>} variants
 * @param {Object|null} current the variant that stays if it can run with the example
 */
export function stateOfExample(example, variants, current = null) {
  const { parameters, variant, selectedRow = 1, ...others } = example.create();
  const fields = { ...NEW_TENSORS, ...NO_REQUEST, ...others };
  const canStay = current && !missingInputs({ ...fields, variant: current }).length;
  return {
    ...fields,
    selectedRow,
    example: example.id,
    parameters: { ...parameters },
    variant: canStay ? current : (variants.get(variant) ?? [...variants.values()][0]),
  };
}

/** Describes an example, and the variant that it sets if another one was chosen before. */
export function describeExample({ about }, { variant }, before) {
  if (!before || before.variant === variant) return about;
  return `${about} The variant is ${variant} now: ${before.variant} has other inputs.`;
}

/** Returns an example that has the inputs of a variant; the first one if none has. */
export const exampleFor = (variant) =>
  findExample((tensors) => !missingInputs({ tensors, variant, layer: null }).length) ?? EXAMPLES[0];

/**
 * Returns an example for a variant that cannot run with the one of the page. Labels that the user
 * typed stay.
 *
 * @param {Object} state of the page, with the variant and the example before
 * @returns {{fields: Object, about: string}} fields of the state
 */
export function newExample({ example: id, labels, variant, variants }) {
  const example = exampleFor(variant);
  const fields = { ...stateOfExample(example, variants), variant };
  const { labels: before } = EXAMPLES.find((one) => one.id === id).create();
  const isTyped = JSON.stringify(labels) !== JSON.stringify(before);
  return { fields: isTyped ? { ...fields, labels } : fields, about: example.about };
}
