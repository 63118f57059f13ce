// The fields of a layer of a checkpoint: layer, layout, heads and positions.

import { h } from "../dom.js";

/** The value of the option for heads that are typed in. */
export const OTHER_HEADS = "other";

/**
 * Creates the fields.
 *
 * @param {(name: string) => void} onChange called with the name of a changed field
 * @returns {Object} `parts`: elements in their order; the inputs by name
 */
export function createLayerFields(onChange) {
  const createSelect = (name, ...options) =>
    h("select", { id: `layer-${name}`, change: () => onChange(name) }, ...options);
  const createNumber = (name, attributes) =>
    h("input", {
      id: `layer-${name}`,
      type: "number",
      autocomplete: "off",
      ...attributes,
      change: () => onChange(name),
    });
  const option = (value, text) => h("option", { value }, text);
  const count = { min: 1, max: 65536, step: 1 };
  const fields = {
    layer: createSelect("layer"),
    layout: createSelect("layout"),
    heads: createSelect("heads"),
    queryHeads: createNumber("queryHeads", count),
    keyHeads: createNumber("keyHeads", count),
    positions: createSelect(
      "positions",
      option("none", "none in the layer"),
      option("rotary", "rotary (RoPE)"),
      option("alibi", "ALiBi"),
    ),
    base: createNumber("base", { min: 1, step: "any" }),
    order: createSelect("order", option("half", "half"), option("interleaved", "interleaved")),
    dims: createNumber("dims", { min: 2, step: 2, placeholder: "all" }),
    rows: createNumber("rows", { min: 1, max: 4096, step: 1 }),
  };
  fields.layer.setAttribute("aria-describedby", "layer-about");
  fields.heads.setAttribute("aria-describedby", "layer-heads-about");
  fields.positions.setAttribute("aria-describedby", "layer-positions-about");
  fields.layerAbout = h("p", { class: "hint", id: "layer-about" });
  fields.headsAbout = h("p", { class: "hint", id: "layer-heads-about" });
  fields.positionsAbout = h("p", { class: "hint", id: "layer-positions-about" });
  fields.rowsAbout = h("p", { class: "hint", id: "layer-rows-about" });
  fields.rows.setAttribute("aria-describedby", "layer-rows-about");
  fields.otherHeads = h(
    "div",
    { class: "thirds" },
    createField("queryHeads", "Query heads", fields.queryHeads),
    createField("keyHeads", "Key heads", fields.keyHeads),
  );
  fields.rotary = h(
    "div",
    { class: "thirds", "data-pointers": "/layer/rope" },
    createField("base", "Base", fields.base),
    createField("order", "Order", fields.order),
    createField("dims", "Channels", fields.dims),
  );
  const layoutField = createField("layout", "Layout", fields.layout, "/layer/layout");
  fields.layoutField = layoutField;
  const pointers = {
    layer: "/layer/prefix /layer/tensors",
    heads: "/layer/heads /layer/kv_heads",
  };
  const parts = [
    createField("layer", "Layer", fields.layer, pointers.layer, fields.layerAbout),
    layoutField,
    createField("heads", "Heads", fields.heads, pointers.heads, fields.headsAbout),
    fields.otherHeads,
    createField("positions", "Positions", fields.positions, null, fields.positionsAbout),
    fields.rotary,
  ];
  const rowsField = createField(
    "rows",
    "Length of the random x",
    fields.rows,
    null,
    fields.rowsAbout,
  );
  return { ...fields, parts, rowsField };
}

function createField(name, label, input, pointers = null, ...hints) {
  return h(
    "div",
    { class: "field", "data-pointers": pointers },
    h("label", { for: `layer-${name}` }, label),
    input,
    ...hints,
  );
}

/** Describes a number of heads that a layer may have. */
export function describeHeads({ heads, kv_heads: keyHeads, width }) {
  const keys = keyHeads === heads ? "" : `, ${keyHeads} key head${keyHeads > 1 ? "s" : ""}`;
  return `${heads} head${heads > 1 ? "s" : ""} of width ${width}${keys}`;
}
