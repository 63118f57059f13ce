// The form of the variant: its name, its formula, and a control for each of its parameters.

import { findById, setText } from "../dom.js";
import { buildRequest } from "../weights/weights_request.js";
import { createControls, showCausalNote } from "./parameter_form.js";
import { missingInputs } from "./request_inputs.js";

/**
 * Creates the form.
 *
 * @param {Object} state of the page
 * @param {() => void} onChange called when the user changed a parameter
 * @returns {() => void} shows the variant and the parameters of the state
 */
export function createVariantForm(state, onChange) {
  const updateNote = () => {
    if (!missingInputs(state).length) showCausalNote(buildRequest(state), state.parameters);
  };
  return () => {
    const { variant, parameters } = state;
    findById("variant").value = variant.variant;
    setText(findById("variant-about"), variant.summary);
    setText(findById("formula"), variant.formula);
    findById("parameters").replaceChildren(
      createControls(variant.parameters.properties, parameters, () => {
        updateNote();
        onChange();
      }),
    );
    updateNote();
  };
}
