// Keeps each state of the page as an entry of the browser's history: back and forward return to it,
// and so does a reload.
//
// What is too large for the fragment stays in memory, and up to 4 MiB in the entry itself.

import { layerBytes } from "../data/request_body.js";
import { debounce } from "../dom.js";
import { formatLink, isLink } from "./page_link.js";

const WAIT_MS = 150; // browsers limit how often an address changes
const TEXT_FIELDS = "input[type=text], input[type=number], textarea";
const MAX_ENTRY_BYTES = 4 * 2 ** 20;
const MAX_KEPT = 30; // states in memory

/**
 * Creates the history. Nothing is recorded before `start`.
 *
 * @param {Object} state of the page
 * @param {(fragment: string, kept: Object|null, layout: Object|null) => void} restore called with the
 *   state to show; `kept`: its fields that are too large for the fragment; `layout`: the fields of the
 *   layout, which stays on the way back and forward
 * @param {(canUndo: boolean) => void} onEntry called when the page shows another entry
 */
export function createPageHistory(state, restore, onEntry) {
  const keptStates = new Map();
  let current = null; // fragment of the state that is recorded
  let field = null; // the field in which the user types now
  let typedIn = null; // the field whose typed text made the last entry

  const keep = (key) => {
    const { labels, layer, layerError, place } = state;
    const tensors = state.tensors.map((entry) => ({ ...entry })); // roles change in place
    keptStates.set(key, { tensors, labels, layer, layerError, place });
    if (keptStates.size > MAX_KEPT) keptStates.delete(keptStates.keys().next().value);
  };
  const write = (method, entry, address) => {
    history[method]({ ...entry, large: largeFields(state) }, "", address);
    keep(entry.key);
    onEntry(entry.index > 0);
  };
  const createKey = () => `${performance.timeOrigin}/${performance.now()}/${Math.random()}`;

  const recordNow = () => {
    recordSoon.cancel();
    if (current === null || !state.variant) return;
    const { fragment } = formatLink(state);
    if (fragment === current && isKept(keptStates.get(history.state.key), state)) return;
    const { index, key } = history.state;
    if (field && field === typedIn) write("replaceState", { index, key }, `#${fragment}`);
    else write("pushState", { index: index + 1, key: createKey() }, `#${fragment}`);
    [current, typedIn] = [fragment, field];
  };
  const recordSoon = debounce(recordNow, WAIT_MS);

  const show = (layout = null) => {
    const fragment = location.hash.slice(1);
    const { key = createKey(), large = null } = history.state ?? {};
    restore(fragment, keptStates.get(key) ?? large, layout);
    [current, typedIn] = [formatLink(state).fragment, null];
    write("replaceState", { index: history.state?.index ?? 0, key }, location.href);
  };
  const notice = ({ target }) => {
    field = target.matches(TEXT_FIELDS) ? target.id : null;
  };
  document.addEventListener("input", notice, true);
  document.addEventListener("click", notice, true);
  addEventListener("popstate", () => {
    if (current === null) return;
    if (!history.state && !isLink(location.hash)) return; // a section
    recordSoon.cancel();
    show(history.state && pickLayout(state));
  });
  return {
    start: () => show(),
    record: recordSoon,
    /** Changes the layout: this entry holds the change, and Undo does not take it back. */
    amend: (change) => {
      recordNow();
      change();
      if (current === null) return;
      current = formatLink(state).fragment;
      write("replaceState", history.state, `#${current}`);
    },
    /** Puts the state into the address; returns that, and the fields that are too large for it. */
    createLink: () => {
      recordNow();
      const { fragment, leftOut } = formatLink(state);
      history.replaceState(history.state, "", `#${fragment}`);
      return { address: location.href, leftOut };
    },
  };
}

const pickLayout = ({ isPresenting, open, closed }) => ({ isPresenting, open, closed });

/** Returns the fields that the fragment does not hold, to survive a reload; null if there are none. */
function largeFields(state) {
  const { tensors, labels, layer } = state;
  const place = state.place && { ...state.place, file: null }; // a reload forgets the file
  const start = layerBytes(layer);
  const byteCount = tensors.reduce((sum, { tensor }) => sum + tensor.data.length, start);
  const isNeeded = place !== null || formatLink(state).leftOut.length > 0;
  return isNeeded && byteCount <= MAX_ENTRY_BYTES ? { tensors, labels, layer, place } : null;
}

/** True if a kept state has the tensors and labels of the page. */
function isKept(kept, { tensors, labels, layer }) {
  return (
    kept !== undefined &&
    kept.layer === layer &&
    kept.labels.join("\n") === labels.join("\n") &&
    kept.tensors.length === tensors.length &&
    kept.tensors.every(
      (one, at) => one.tensor === tensors[at].tensor && one.role === tensors[at].role,
    )
  );
}
