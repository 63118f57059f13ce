// Parses tables of numbers: CSV, and cells of a spreadsheet, which tabs separate.

const NUMBER = /^[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?$/i;
const SPECIAL = { nan: "NaN", inf: "Infinity", "-inf": "-Infinity" };

const LISTS = /^\s*(?:[\w.]+\s*=\s*)?(?:[\w.]+\()?[[{(](?![A-Za-z]+\])/;

const QUOTED = /"(?:[^"]|"")*"/g;

/**
 * Returns a text as a cell that a spreadsheet does not run as a formula: behind an apostrophe, if it
 * begins as a formula does and is no number. `parseTable` takes the apostrophe away.
 */
export const guardText = (text) =>
  /^[=+\-@\t\r]/.test(text) && !NUMBER.test(text) ? `'${text}` : text;

/** True if a text is several cells with numbers, not a list or an object; [CLS] is a word. */
export const isTable = (text) => /\d/.test(text) && /\S[\t;,\s]+\S/.test(text) && !LISTS.test(text);

/**
 * Parses a table. A first column of words gives the labels of the rows. Without one, a first row of
 * words gives them if it has as many as there are rows; else its names are those of channels. An
 * empty first cell makes the first row and column names.
 *
 * @param {string} text; tabs, semicolons, commas or spaces separate its cells. A comma is a decimal
 *   comma if tabs or semicolons separate
 * @returns {{rows: Array[], labels: string[]}} `rows`: numbers as JSON has them
 * @throws {Error} a message for the user
 */
export function parseTable(text) {
  const bare = text.replaceAll(QUOTED, "");
  const separator = ["\t", ";", ","].find((one) => bare.includes(one)) ?? " ";
  const lines = text.split(/\r?\n/).filter((line) => line.trim());
  const cells = lines.map((line) => splitLine(line, separator));
  const hasDecimalCommas = separator === "\t" || separator === ";";
  const toNumber = (cell) => parseCell(hasDecimalCommas ? cell.replace(",", ".") : cell);
  const isWord = (cell) => cell !== "" && toNumber(cell) === null;
  const hasLines = cells.length > 1 && cells[0].length > 1;
  const hasCorner = hasLines && cells[0][0] === ""; // as pandas writes the names of both axes
  const hasHeader = hasCorner || (hasLines && cells[0].slice(1).every(isWord));
  const body = hasHeader ? cells.slice(1) : cells;
  const hasWords = hasCorner || body.every(([first, ...others]) => isWord(first) && others.length);
  const rows = body.map((line, row) =>
    (hasWords ? line.slice(1) : line).map((cell, col) => {
      const number = toNumber(cell);
      if (number !== null) return number;
      const place = `line ${row + 1 + hasHeader}, cell ${col + 1 + hasWords}`;
      throw new Error(`${place} of the table is “${cell.slice(0, 40)}”, expected a number`);
    }),
  );
  const wrong = rows.findIndex((row) => row.length !== rows[0].length);
  if (wrong > 0) {
    const counts = `${rows[wrong].length} numbers, but the first has ${rows[0].length}`;
    throw new Error(`line ${wrong + 1 + hasHeader} of the table has ${counts}`);
  }
  const names = body.map(([name]) => name);
  if (hasWords) return { rows, labels: names.some(isWord) ? names : [] };
  const isSquare = hasHeader && cells[0].length === rows.length;
  return { rows, labels: isSquare ? cells[0] : [] };
}

/** Splits a line into cells; quotes hold separators, and two of them stand for one. */
function splitLine(line, separator) {
  if (separator === " ") return line.trim().split(/\s+/);
  const cells = [];
  const pattern = new RegExp(`(?:"((?:[^"]|"")*)"|([^${separator}]*))(${separator}|$)`, "g");
  for (const [whole, quoted, plain, end] of line.matchAll(pattern)) {
    if (!whole && cells.length && !line.endsWith(separator)) break;
    cells.push(unguard((quoted?.replaceAll('""', '"') ?? plain).trim()));
    if (!end) break;
  }
  return cells;
}

const unguard = (cell) => (guardText(cell.slice(1)) === cell ? cell.slice(1) : cell);

/** Returns the number of a cell, or its word in JSON; null if it is neither. */
export function parseCell(cell) {
  if (NUMBER.test(cell)) return Number(cell);
  const word = cell.toLowerCase();
  return Object.hasOwn(SPECIAL, word) ? SPECIAL[word] : null;
}
