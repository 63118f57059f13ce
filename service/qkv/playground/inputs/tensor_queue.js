// Adds uploaded and pasted tensors to those of the page, in the order in which the user brings them.

import { isOfModel } from "../data/request_body.js";
import { readFile } from "../data/uploads.js";
import { requestTarget } from "./pasted_request.js";
import { addTensors, namesOfUser } from "./tensor_roles.js";

/** Returns the layer of a model, to which uploaded tensors are added; null for other layers. */
export const keptLayer = ({ layer }) => (isOfModel(layer) ? layer : null);

/**
 * Creates the queue.
 *
 * @param {Object} state of the page
 * @param {Object} callbacks
 * @param {Object} callbacks.question from `createReplaceQuestion`
 * @param {(tensors: Array, options: {isAdded, request, labels}) => void} callbacks.onAdd called with
 *   all tensors; `isAdded`: earlier ones are among them; `request`: the uploaded request, or null;
 *   `labels`: words of an uploaded table
 * @param {(message: string|null) => void} callbacks.onError
 * @param {(files: File[]) => Promise<File[]>} callbacks.takeFiles takes the files of a checkpoint, and
 *   returns the others
 * @returns {{addFiles: (files: File[]) => void, addUpload: (upload: Object) => void}}
 */
export function createTensorQueue(state, { question, onAdd, onError, takeFiles }) {
  // A small file that is chosen after a large one is read sooner, but is added after it.
  let earlier = Promise.resolve();
  const inOrder = (add) => {
    question.focus();
    earlier = earlier.then(async () => {
      onError(null);
      await add().catch((error) => onError(error.message));
    });
  };

  const addUploads = async (uploads, fileNames = []) => {
    if (!state.variant) throw new Error("the list of variants is not loaded yet");
    const request = uploads.map((upload) => upload.request).find(Boolean) ?? null;
    const added = Object.assign({}, ...uploads.map(({ tensors }) => tensors));
    const { replaced } = merge(added, request, state);
    let keepsAll = false;
    if (replaced.length) {
      const names = request ? ["This request"] : Object.keys(added);
      const answer = await question.ask(names, replaced, state.tensors, !request);
      if (answer === null) return;
      keepsAll = answer === "keep";
    }
    const { tensors, isAdded } = merge(added, request, state, keepsAll);
    for (const entry of tensors) {
      const file = `${entry.name}.npy`;
      if (fileNames.includes(file) && entry.tensor === added[entry.name]) entry.file = file;
    }
    const labels = uploads.map((upload) => upload.labels ?? []).find((one) => one.length) ?? [];
    onAdd(tensors, { isAdded, request, labels });
  };

  return {
    addFiles: (chosen) =>
      inOrder(async () => {
        const files = await takeFiles(chosen);
        if (!files.length) return;
        const uploads = await Promise.all(files.map((file) => readFile(file)));
        await addUploads(
          uploads,
          files.map(({ name }) => name),
        );
      }),
    addUpload: (upload) => inOrder(() => addUploads([upload])),
  };
}

/** Merges new tensors with those of the page; a request replaces all of them. */
function merge(added, request, state, keepsAll = false) {
  if (!request) return addTensors(added, { ...state, layer: keptLayer(state) }, keepsAll);
  const target = { ...state, ...requestTarget(request, state), tensors: [] };
  return { ...addTensors(added, target), replaced: namesOfUser(state.tensors) };
}
