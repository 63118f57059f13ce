// Applies the fields of an uploaded or pasted request to the page, and reports what is ignored.

import { isLoaded } from "../data/request_body.js";
import { isObject } from "../data/tensors.js";

const REASONS = {
  outputs: "the page requests the output and the weights",
  encoding: "the page chooses the encoding",
  variants: "select variants below Compare",
};

/**
 * Returns the variant and the layer that a request names; `state` has those of the page.
 *
 * @param {{variant: string|null, fields: Object}} request
 * @param {Object} state of the page
 */
export function requestTarget({ variant: pathVariant, fields }, state) {
  const { anchor } = fields;
  const name = pathVariant ?? fields.variant ?? anchor?.variant ?? anchor ?? null;
  return {
    name,
    variant: state.variants.get(name) ?? state.variant,
    layer: isObject(fields.layer?.tensors) || isLoaded(fields.layer) ? fields.layer : null,
  };
}

/**
 * Sets variant, parameters, layer, dtype and weights form of the page's state.
 *
 * @param {Object} state of the page, with the request's tensors
 * @param {{variant: string|null, fields: Object}} request
 * @param {(state: Object) => {rows: number, bins: number|null}} measure sizes of the weights
 * @returns {string} what was applied and what was ignored, for the user
 */
export function applyRequest(state, request, measure) {
  const { variant: _, parameters = {}, anchor, layer, dtype, weights, ...others } = request.fields;
  const target = requestTarget(request, state);
  const applied = [];
  const ignored = [];
  const ignore = (name, reason) => ignored.push(`${name} (${reason})`);
  Object.assign(state, { variant: target.variant, layer: target.layer });
  if (state.variants.has(target.name)) applied.push(`variant ${target.name}`);
  else if (target.name !== null)
    ignore(`variant ${target.name}`, "the service has no such variant");
  const values = isObject(anchor?.parameters) ? anchor.parameters : parameters;
  for (const [name, value] of Object.entries(isObject(values) ? values : {})) {
    if (name in state.variant.parameters.properties) {
      state.parameters[name] = value;
      applied.push(`${name} ${JSON.stringify(value)}`);
    } else {
      ignore(name, `${state.variant.variant} has no such parameter`);
    }
  }
  if (target.layer) applied.push("layer");
  else if (layer !== undefined && layer !== null)
    ignore("layer", "expected an object with a name or with tensors");
  if (typeof dtype === "string") {
    state.dtype = dtype;
    applied.push(`dtype ${dtype}`);
  }
  if (weights !== undefined) applyWeightsForm(state, weights, measure, { applied, ignore });
  for (const name of Object.keys(others))
    ignore(name, REASONS[name] ?? "the page has no such control");
  return [
    applied.length ? `Applied: ${applied.join(", ")}.` : "",
    ignored.length ? `Ignored: ${ignored.join(", ")}.` : "",
    target.name === null
      ? `The request names no variant; the page keeps ${state.variant.variant}.`
      : "",
  ]
    .filter(Boolean)
    .join(" ");
}

/** Applies the form of the weights where the page can show it. */
function applyWeightsForm(state, form, measure, { applied, ignore }) {
  const { rows, bins } = measure(state);
  if (form === "full") {
    if (bins === null) applied.push("full weights");
    else ignore("full weights", "the page pools a map of this size");
  } else if (Number.isInteger(form?.pool) && form.pool > 0) {
    state.pool = form.pool;
    applied.push(`weights pooled to ${form.pool}`);
  } else if (Array.isArray(form?.rows) && Number.isInteger(form.rows[0]) && form.rows[0] < rows) {
    const row = form.rows[0];
    state.selectedRow = row < 0 ? Math.max(row + rows, 0) : row;
    applied.push(`row ${row}`);
    if (form.rows.length > 1) ignore(`${form.rows.length - 1} more rows`, "the page shows one");
  } else {
    ignore(`weights ${JSON.stringify(form)}`, "the page does not show this form");
  }
}
