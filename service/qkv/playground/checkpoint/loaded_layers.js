// The list of the layers that the service has loaded. The chosen one is the layer of the page's
// requests, which have its name and no tensors.

import { get } from "../api.js";
import { isLoaded } from "../data/request_body.js";
import { findById, formatCount } from "../dom.js";
import { createHiddenStates } from "./hidden_states.js";

const ROWS = 16; // of the random hidden states

/**
 * Creates the list, which is hidden if the service has loaded no layer.
 *
 * @param {(chosen: {layer, tensors, parameters}|null) => void} onLayer called with what a chosen
 *   layer sets in the state of the page; null: none is chosen
 * @returns {{load: () => Promise<void>, show: (layer: Object|null) => void}} `load`: asks the
 *   service; `show`: selects the layer of the page
 */
export function createLoadedLayers(onLayer) {
  const select = findById("loaded-layer");
  const about = findById("loaded-layer-about");
  let layers = [];
  const find = (name) => layers.find((one) => one.name === name) ?? null;

  const show = (layer) => {
    const found = isLoaded(layer) ? find(layer.name) : null;
    select.value = found?.name ?? "";
    about.textContent = found
      ? `${found.heads} heads, width ${found.width}, ${found.dtype}, layout ${found.layout}. The service has its ${formatCount(found.bytes, "B")}.`
      : "Layers of checkpoints that the service has loaded. A request has only hidden states.";
  };

  const load = async () => {
    ({ layers } = await get("/v1/layers"));
    select.replaceChildren(new Option("None", ""), ...layers.map(({ name }) => new Option(name)));
    findById("loaded-layer-field").hidden = !layers.length;
    show(null);
  };

  select.addEventListener("change", () => {
    const found = find(select.value);
    if (!found) return onLayer(null);
    const { name, heads, width, dtype, parameters } = found;
    onLayer({
      layer: { name, heads },
      tensors: [createHiddenStates(ROWS, width, dtype)],
      parameters: { ...parameters },
    });
  });
  return { load, show };
}
