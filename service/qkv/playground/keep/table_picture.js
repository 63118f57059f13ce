// Draws a table: a line of headings, then a line for each row, with numbers at the right of columns.

import { formatNumber } from "../dom.js";
import { SANS } from "../theme.js";

const FONT = `12px ${SANS}`;
const MAX_ROWS = 60;
const ROW_HEIGHT = 24;
const LINE_HEIGHT = 15; // of a heading
const COLUMN_GAP = 18;

/**
 * Lays out a table.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {{headings: string[], rows: Array<Array<string|number|null>>}} table
 * @returns {{width: number, height: number, draw: (colours: Object) => void}} in pixels
 */
export function layOutTable(context, { headings, rows }) {
  const titles = headings.map((heading) => heading.split(/(?<=,) /)); // lines of each heading
  const shown = rows.slice(0, MAX_ROWS).map((cells) => cells.map(formatCell));
  const hiddenCount = rows.length - shown.length;
  const columns = measureColumns(context, titles, rows, shown);
  const top = Math.max(...titles.map((lines) => lines.length)) * LINE_HEIGHT + 9;
  const width = Math.ceil(columns.at(-1).end);
  const write = (text, { isNumber, start, end }, y) => {
    context.textAlign = isNumber ? "right" : "left";
    context.fillText(text, isNumber ? end : start, y);
  };
  const draw = ({ ink, muted, line }) => {
    const rule = (y) => {
      context.fillStyle = line;
      context.fillRect(0, y - 1, width, 1);
      context.fillStyle = ink;
    };
    context.textBaseline = "middle";
    context.font = `600 ${FONT}`;
    rule(top);
    titles.forEach((lines, col) => {
      const first = top - lines.length * LINE_HEIGHT + 2;
      lines.forEach((text, at) => write(text, columns[col], first + at * LINE_HEIGHT));
    });
    context.font = FONT;
    shown.forEach((cells, row) => {
      const y = top + row * ROW_HEIGHT;
      rule(y + ROW_HEIGHT);
      cells.forEach((text, col) => write(text, columns[col], y + ROW_HEIGHT / 2));
    });
    if (!hiddenCount) return;
    context.fillStyle = muted;
    const y = top + (shown.length + 0.5) * ROW_HEIGHT;
    write(`${hiddenCount} more rows are in the CSV file.`, columns[0], y);
  };
  return { width, height: top + (shown.length + Math.sign(hiddenCount)) * ROW_HEIGHT, draw };
}

/** Returns where each column starts and ends; columns of numbers are aligned at their end. */
function measureColumns(context, titles, rows, shown) {
  const widest = (texts) => Math.max(...texts.map((text) => context.measureText(text).width));
  context.font = `600 ${FONT}`;
  let start = 0;
  return titles.map((lines, col) => {
    const end = start + widest([...lines, ...shown.map((cells) => cells[col])]);
    const isNumber = rows.some((cells) => typeof cells[col] === "number");
    const column = { start, end, isNumber };
    start = end + COLUMN_GAP;
    return column;
  });
}

const formatCell = (cell) => (typeof cell === "number" ? formatNumber(cell) : (cell ?? "–"));
