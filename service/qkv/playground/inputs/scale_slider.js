// A slider for the factor of the scores: the weights follow while it is dragged.

import { formatNumber, h } from "../dom.js";

const OCTAVES = 6; // on each side of a factor of 1
const STEPS = 8; // in an octave

/**
 * Creates the slider of a number field. The factor doubles with each octave.
 *
 * @param {HTMLInputElement} input the field; it changes with the slider, and moves it
 * @param {Object} options
 * @param {number} options.initial the factor while the field is empty
 * @param {boolean} options.isSoftmax a larger factor makes rows of weights sharper
 * @param {(factor: number) => void} options.onDrag called while the slider moves, with the field's number
 */
export function createScaleSlider(input, { initial, isSoftmax, onDrag }) {
  const slider = h("input", {
    type: "range",
    min: -OCTAVES,
    max: OCTAVES,
    step: 1 / STEPS,
    "aria-label": "scale, by the slider",
    input: () => {
      input.value = Number((2 ** slider.value).toPrecision(3));
      describe();
      onDrag(factor());
    },
    change: () => input.dispatchEvent(new Event("input")),
  });
  const describe = () => {
    slider.setAttribute("aria-valuetext", formatNumber(factor(), 3));
  };
  const factor = () => Number(input.value.replace(",", ".") || initial);
  const follow = () => {
    if (factor() > 0) slider.value = Math.log2(factor());
    describe();
  };
  input.addEventListener("input", follow);
  follow();
  const ends = isSoftmax ? ["flat", "sharp"] : ["less", "more"];
  const [low, high] = ends.map((text) => h("span", { "aria-hidden": "true" }, text));
  return h("div", { class: "slider" }, low, slider, high);
}
