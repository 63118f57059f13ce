// The list of the request's tensors with the role of each; adds uploaded and pasted tensors.

import { isFromFile, isOfModel } from "../data/request_body.js";
import { readFile } from "../data/uploads.js";
import { findById, setText } from "../dom.js";
import { toSentence } from "../error_messages.js";
import { createPasteDialog } from "./paste_dialog.js";
import { requestTarget } from "./pasted_request.js";
import { createReplaceQuestion } from "./replace_question.js";
import { acceptsInput, missingInputs } from "./request_inputs.js";
import { createLayerRow, createMissingRow, createRow } from "./tensor_rows.js";
import { addTensors, listRoles, UNUSED } from "./tensor_roles.js";

/**
 * Creates the list and its upload and paste controls.
 *
 * @param {Object} state of the page
 * @param {Object} callbacks
 * @param {(tensors: Array, options: {isAdded, request, labels}) => void} callbacks.onAdd called with
 *   all tensors; `isAdded`: earlier ones are among them; `request`: the uploaded request, or null;
 *   `labels`: words of an uploaded table
 * @param {() => void} callbacks.onChange called when a role changed or a tensor was removed
 * @param {() => void} callbacks.onEdit called when a number of the grid changed
 * @param {(files: File[]) => Promise<File[]>} callbacks.takeFiles takes the files of a checkpoint, and
 *   returns the others
 * @returns {{show: () => void, openPaste: (onCancel: () => void) => void}}
 */
export function createTensorList(state, { onAdd, onChange, onEdit, takeFiles }) {
  const list = findById("tensors");
  const question = createReplaceQuestion();
  list.after(question.element);
  const showError = (text) => setText(findById("inputs-error"), text && toSentence(text));
  const openGrids = new Set(); // names of the tensors whose numbers are shown

  const addUploads = async (uploads, files = []) => {
    if (!state.variant) throw new Error("the list of variants is not loaded yet");
    const request = uploads.map((upload) => upload.request).find(Boolean) ?? null;
    const added = Object.assign({}, ...uploads.map(({ tensors }) => tensors));
    const add = (keepsAll) => {
      if (!request) return addTensors(added, { ...state, layer: keptLayer(state) }, keepsAll);
      const target = { ...state, ...requestTarget(request, state), tensors: [] };
      return { ...addTensors(added, target), replaced: namesOfUser(state.tensors) };
    };
    let keepsAll = false;
    const { replaced } = add(keepsAll);
    if (replaced.length) {
      const names = request ? ["This request"] : Object.keys(added);
      const answer = await question.ask(names, replaced, state.tensors, !request);
      if (answer === null) return;
      keepsAll = answer === "keep";
    }
    const { tensors, isAdded } = add(keepsAll);
    for (const entry of tensors) {
      const file = `${entry.name}.npy`;
      if (files.includes(file) && entry.tensor === added[entry.name]) entry.file = file;
    }
    const labels = uploads.map((upload) => upload.labels ?? []).find((one) => one.length) ?? [];
    onAdd(tensors, { isAdded, request, labels });
  };

  // A small file that is chosen after a large one is read sooner, but is added after it.
  let earlier = Promise.resolve();
  const inOrder = (add) => {
    question.focus();
    earlier = earlier.then(async () => {
      showError(null);
      await add().catch((error) => showError(error.message));
    });
  };
  const addFiles = (chosen) => {
    const every = [...chosen];
    inOrder(async () => {
      const files = await takeFiles(every);
      if (!files.length) return;
      const uploads = await Promise.all(files.map((file) => readFile(file)));
      const names = files.map(({ name }) => name).filter((name) => name.endsWith(".npy"));
      await addUploads(uploads, names);
    });
  };
  findById("upload").addEventListener("change", (event) => {
    addFiles(event.target.files);
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
    if (event.dataTransfer.files.length) addFiles(event.dataTransfer.files);
  });
  const openPaste = createPasteDialog(
    (upload) => inOrder(() => addUploads([upload])),
    () => findById("upload").click(),
  );
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

/** Returns the layer of a model, to which uploaded tensors are added; null for other layers. */
export const keptLayer = ({ layer }) => (isOfModel(layer) ? layer : null);

const namesOfUser = (tensors) =>
  tensors.filter(({ isUploaded }) => isUploaded).map(({ name }) => name);
