// Token labels: parses the text of the field and matches labels to queries and keys.

const WORDS = /"(?=[^\s"])(?:[^"\\]|\\.)*"(?=\s|$)|\S+/g; // words, or texts in double quotes

/**
 * Parses labels: a JSON list, one label a line, or words. A label with spaces is in double quotes.
 *
 * @param {string} text
 * @returns {string[]}
 */
export function parseLabels(text) {
  const trimmed = text.trim();
  const list = trimmed.startsWith("[") ? parseOrNull(trimmed) : null;
  if (Array.isArray(list))
    return list.map((one) => (typeof one === "string" ? one : JSON.stringify(one)));
  if (trimmed.includes("\n"))
    return trimmed
      .split(/\r?\n/)
      .map((line) => line.trim())
      .filter(Boolean);
  return (trimmed.match(WORDS) ?? []).map((word) => {
    const unquoted = word.length > 1 && word.startsWith('"') ? parseOrNull(word) : null;
    return typeof unquoted === "string" ? unquoted : word;
  });
}

function parseOrNull(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // such as [CLS], a token of its own
  }
}

/** Formats labels so that `parseLabels` returns the same ones. */
export function formatLabels(labels) {
  const text = labels.join(" ");
  const isSame = JSON.stringify(parseLabels(text)) === JSON.stringify(labels);
  return isSame ? text : JSON.stringify(labels);
}

/**
 * Returns the labels of a head of a captured model: those of the head before, which the user may
 * have typed, if it was of the same sequences; else the tokens of the file.
 *
 * @param {Object} place of the head
 * @param {{place: Object|null, labels: string[]}} before the page's state
 */
export function labelsOfHead(place, before) {
  const describe = ({ items, tokens, lengths }) => JSON.stringify([items, tokens, lengths]);
  const isSame = before.place?.file === place.file && describe(before.place) === describe(place);
  return isSame ? before.labels : (place.tokens[0] ?? []);
}

/** Returns the labels of a sequence of a captured model, unless the user typed others. */
export function labelsOfSequence(index, { place, head, labels }) {
  const tokens = place?.tokens ?? [];
  const isTyped = JSON.stringify(labels) !== JSON.stringify(tokens[head] ?? []);
  return isTyped ? labels : (tokens[index] ?? []);
}

/**
 * Assigns labels to queries and keys. A number of labels that fits neither labels the first
 * positions of both.
 *
 * @param {string[]} labels
 * @param {number} rows queries
 * @param {number} cols keys
 * @returns {{row: string[], col: string[], note: string|null}} `note` if the number does not fit
 */
export function matchLabels(labels, rows, cols) {
  const { length } = labels;
  const isFitting = !length || length === rows || length === cols;
  const pick = (count) => {
    if (isFitting) return length === count ? labels : [];
    return labels.slice(0, count);
  };
  return {
    row: pick(rows),
    col: pick(cols),
    note: isFitting ? null : describeMismatch(length, rows, cols),
  };
}

function describeMismatch(count, rows, cols) {
  const labels = count === 1 ? "1 label" : `${count} labels`;
  const positions = rows === cols ? `${rows} positions` : `${rows} queries and ${cols} keys`;
  const most = Math.max(rows, cols);
  const rest =
    count < most
      ? "the other positions show their index"
      : `the last ${count - most} are not shown`;
  return `${labels} for ${positions}: ${rest}.`;
}
