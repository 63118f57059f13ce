// The rows of the list of tensors.

import { h } from "../dom.js";
import { createGrid, isEditable } from "./tensor_grid.js";

/**
 * Creates the row of a tensor.
 *
 * @param {{name, role, tensor}} entry
 * @param {Object} list
 *   tensors, variant, labels: of the page; roles: that a tensor can have
 *   isUsed: (role) => true if the variant takes it; openGrids: names of tensors with an open grid
 *   onChange: called when its role changed or it was removed; onEdit: when a number changed
 */
export function createRow(entry, list) {
  const { name, role, tensor } = entry;
  const isUsed = role.split(", ").some(list.isUsed);
  const select = h("select", {
    "aria-label": `Role of ${name}`,
    change: (event) => {
      const isUploaded = entry.isUploaded || !entry.isRandom; // with a chosen role it is the user's
      Object.assign(entry, { role: event.target.value, isChosen: true, isUploaded });
      list.onChange();
    },
  });
  select.append(...list.roles.map((one) => h("option", { selected: one === role }, one)));
  const remove = () => {
    list.tensors.splice(list.tensors.indexOf(entry), 1);
    list.onChange();
  };
  const shape = `${tensor.shape.join(" × ")} ${tensor.literal ? "" : tensor.dtype}`;
  const item = h(
    "li",
    { class: isUsed ? "" : "idle" },
    h("span", { class: "name" }, name),
    h("span", { class: "shape" }, shape),
    h(
      "button",
      { type: "button", class: "quiet", "aria-label": `Remove ${name}`, click: remove },
      "×",
    ),
    h("div", { class: "roles" }, select),
  );
  if (!isUsed) {
    item.append(h("span", { class: "hint" }, `${list.variant.variant} has no such input`));
  }
  if (isSwapped(role, tensor.shape)) {
    const [heads, length] = tensor.shape.slice(-3);
    const words = `${heads} heads of ${length} positions: expected axes (heads, positions, channels). Check their order.`;
    item.append(h("span", { class: "hint swapped" }, words));
  }
  if (isEditable(tensor)) {
    const { button, grid } = createGrid(entry, list);
    select.after(button);
    item.append(grid);
  }
  item.dataset.pointers = role
    .split(", ")
    .map((one) => `/inputs/${one}`)
    .join(" ");
  return item;
}

/** True if heads and positions may be swapped; a single position can have any number of heads. */
function isSwapped(role, shape) {
  const isSequence = role.split(", ").some((one) => ["query", "key", "value"].includes(one));
  return isSequence && shape.length > 2 && shape.at(-2) > 1 && shape.at(-3) > shape.at(-2);
}

/** Creates the row of an input that is missing. */
export function createMissingRow(name) {
  return h(
    "li",
    { class: "needed", "data-pointers": `/inputs/${name}` },
    h("span", { class: "name" }, name),
    h("span", { class: "hint" }, "required"),
  );
}

/** Creates the row of the layer of a request. */
export function createLayerRow(layer) {
  const shapes = Object.entries(layer.tensors ?? {}).map(
    ([name, tensor]) => `${name} ${wireShape(tensor).join(" × ")}`,
  );
  return h(
    "li",
    { "data-pointers": "/layer" },
    h("span", { class: "name" }, "layer"),
    h("span", { class: "shape" }, layer.name ?? layer.layout ?? ""),
    h("span", { class: "hint" }, shapes.join(", ")),
  );
}

/** Returns the shape of a tensor as JSON has it: nested lists, or {"shape"}. */
function wireShape(tensor) {
  if (!Array.isArray(tensor)) return tensor?.shape ?? [];
  return [tensor.length, ...(Array.isArray(tensor[0]) ? wireShape(tensor[0]) : [])];
}
