// The list of the request's tensors with the role of each, and the controls that add tensors.

import { isFromFile } from "../data/request_body.js";
import { findById, setText } from "../dom.js";
import { toSentence } from "../error_messages.js";
import { createPasteDialog } from "./paste_dialog.js";
import { createReplaceQuestion } from "./replace_question.js";
import { acceptsInput, missingInputs } from "./request_inputs.js";
import { createTensorQueue } from "./tensor_queue.js";
import { listRoles, UNUSED } from "./tensor_roles.js";
import { createLayerRow, createMissingRow, createRow } from "./tensor_rows.js";

/**
 * Creates the list and its upload and paste controls.
 *
 * @param {Object} state of the page
 * @param {Object} callbacks
 * @param {Function} callbacks.onAdd as for `createTensorQueue`
 * @param {Function} callbacks.takeFiles as for `createTensorQueue`
 * @param {() => void} callbacks.onChange called when a role changed or a tensor was removed
 * @param {() => void} callbacks.onEdit called when a number of the grid changed
 * @returns {{show: () => void, openPaste: (onCancel: () => void) => void}}
 */
export function createTensorList(state, { onAdd, onChange, onEdit, takeFiles }) {
  const list = findById("tensors");
  const question = createReplaceQuestion();
  list.after(question.element);
  const showError = (text) => setText(findById("inputs-error"), text && toSentence(text));
  const openGrids = new Set(); // names of the tensors whose numbers are shown
  const queue = createTensorQueue(state, { question, onAdd, onError: showError, takeFiles });

  findById("upload").addEventListener("change", (event) => {
    queue.addFiles([...event.target.files]);
    event.target.value = ""; // lets the user select the same file again
  });
  const form = findById("request-form");
  form.addEventListener("dragover", (event) => {
    event.preventDefault();
    form.classList.add("over");
  });
  for (const name of ["dragleave", "drop"]) {
    form.addEventListener(name, () => form.classList.remove("over"));
  }
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) queue.addFiles([...event.dataTransfer.files]);
  });
  const openPaste = createPasteDialog(queue.addUpload, () => findById("upload").click());
  findById("paste-open").addEventListener("click", () => openPaste());

  const show = () => {
    showError(null);
    question.cancelFor(state.tensors);
    const roles = [...listRoles(state), UNUSED];
    const isUsed = (role) => acceptsInput(role, state.variant, state.layer);
    const { tensors, variant, labels } = state;
    const listed = { tensors, variant, labels, roles, isUsed, openGrids, onChange, onEdit };
    list.replaceChildren(
      ...tensors.map((entry) => createRow(entry, listed)),
      ...(state.layer && !isFromFile(state.layer) ? [createLayerRow(state.layer)] : []),
      ...missingInputs(state).map(createMissingRow),
    );
  };
  return { show, showError, openPaste };
}
