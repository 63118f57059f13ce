// The form of the variant: its name, its formula, and a control for each of its parameters.

import { findById, setText } from "../dom.js";
import { buildRequest } from "../weights/weights_request.js";
import { createControls, showCausalNote } from "./parameter_form.js";
import { inputsFor, missingInputs } from "./request_inputs.js";

/**
 * Creates the form.
 *
 * @param {Object} state of the page
 * @param {() => void} onChange called when the user changed a parameter
 * @param {() => void} onDrag called for each value of a parameter while the user drags its slider
 * @returns {() => void} shows the variant and the parameters of the state
 */
export function createVariantForm(state, onChange, onDrag) {
  const updateNote = () => {
    if (!missingInputs(state).length) showCausalNote(buildRequest(state), state.parameters);
  };
  return () => {
    const { variant, parameters } = state;
    findById("variant").value = variant.variant;
    setText(findById("variant-about"), variant.summary);
    setText(findById("formula"), variant.formula);
    const change = () => {
      updateNote();
      onChange();
    };
    const isSoftmax = variant.weights.includes("stochastic");
    const slider = { initial: defaultScale(state), isSoftmax, onDrag };
    findById("parameters").replaceChildren(
      createControls(variant.parameters.properties, parameters, change, slider),
    );
    updateNote();
  };
}

/** Returns 1/sqrt(D), which scales scores by default; 1 if a layer makes the queries. */
function defaultScale({ tensors, variant, layer }) {
  const D = inputsFor(tensors, variant, layer).query?.shape.at(-1);
  return D ? D ** -0.5 : 1;
}
