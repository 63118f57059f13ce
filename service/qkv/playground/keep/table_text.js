// Writes a table as a text: CSV with every digit, and rounded cells for the clipboard. A spreadsheet
// runs no text of it as a formula.

import { guardText } from "../data/tables.js";
import { h } from "../dom.js";

const COPIED_DIGITS = 6; // significant digits; more are of no use in a document

/**
 * Writes a table as CSV (RFC 4180, with lines that end in \n).
 *
 * @param {{headings: string[], rows: Array<Array<string|number|null>>}} table
 */
export function toCsv({ headings, rows }) {
  const quote = (text) => (/[",;\t\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const toLine = (cells) => `${cells.map((cell) => quote(toText(cell))).join(",")}\n`;
  return [headings, ...rows].map(toLine).join("");
}

/** Copies a table, for spreadsheets and for documents; returns false if the browser refuses. */
export async function copyTable({ headings, rows }) {
  const short = rows.map((cells) => cells.map((cell) => toText(round(cell))));
  const names = headings.map(toText);
  const lines = [names, ...short].map((cells) =>
    cells.map((text) => text.replace(/\s+/g, " ")).join("\t"),
  );
  const createLine = (tag, cells) => h("tr", {}, ...cells.map((text) => h(tag, {}, text)));
  const body = short.map((cells) => createLine("td", cells));
  const html = h("table", {}, createLine("th", names), ...body).outerHTML;
  const toBlob = (text, type) => new Blob([text], { type });
  try {
    const item = new ClipboardItem({
      "text/plain": toBlob(lines.join("\n"), "text/plain"),
      "text/html": toBlob(html, "text/html"),
    });
    await navigator.clipboard.write([item]);
    return true;
  } catch {
    return false; // the clipboard needs https or localhost
  }
}

const round = (cell) => (Number.isFinite(cell) ? Number(cell.toPrecision(COPIED_DIGITS)) : cell);

/** Returns the text of a cell; infinity is a word that Python reads. */
const toText = (cell) =>
  typeof cell === "string"
    ? guardText(cell)
    : String(cell ?? "").replace(/^(-?)Infinity$/, "$1inf");
