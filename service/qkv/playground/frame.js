// What stands around a matrix: where the cells lie, the names of rows and columns, and bars.

const FONT = "12px system-ui, -apple-system, 'Segoe UI', sans-serif";
const LEAST = 11; // pixels that a name needs across its line
const WIDEST = 110; // pixels that a cell may have
const THIN = 4; // pixels of a cell; bars that thin touch, and show an outline
const TIP = 3; // pixels of it
const THICK = 12; // pixels that a bar may have

/**
 * Where everything lies, in pixels.
 *
 * @param {CanvasRenderingContext2D} context to measure words with
 * @param {Object} shown what `Matrix.show` was given
 * @param {number} width that there is
 * @param {number} most how high the cells may get in all
 */
export function frame(context, shown, width, most) {
  context.font = FONT;
  const widest = (names) => Math.max(...names.map((name) => context.measureText(name).width));
  const narrow = width < 480;
  const bars = narrow ? 30 : 48;
  const rowWords = shown.rowLabels ? Math.min(widest(shown.rowLabels), narrow ? 64 : 110) : 28;
  const left = rowWords + 12 + (shown.rowAxis ? 20 : 0);
  const end = shown.colLabels ? 0.72 * context.measureText(shown.colLabels.at(-1)).width : 0;
  const right = Math.max(shown.rowBars ? bars + 12 : 4, end); // the last name may be turned
  const ratio = shown.rows / shown.cols;
  // square cells, unless that made a matrix a strip
  const fitting = ratio > 0.4 && ratio < 2.5 ? most / ratio : Infinity;
  const cellsWide = Math.max(Math.min(width - left - right, shown.cols * WIDEST, fitting), 40);
  const colWidest = shown.colLabels ? widest(shown.colLabels) : 24;
  const turn = shown.colLabels ? turned(cellsWide / shown.cols, colWidest) : 0;
  const words = turn ? Math.min(colWidest, 110) * Math.sin(turn) + 10 : 14;
  const top = words + 8 + (shown.colAxis ? 20 : 0);
  const cellsHigh = Math.round(Math.min(cellsWide * ratio, most));
  const high = Math.max(cellsHigh, Math.min(shown.rows * 22, 120));
  return {
    left,
    top,
    width: cellsWide,
    height: high,
    cellWidth: cellsWide / shown.cols,
    cellHeight: high / shown.rows,
    bars,
    turn,
    total: top + high + (shown.colBars ? bars + 34 : 6),
  };
}

/** How far columns' names are turned: as little as has them stand clear of one another. */
function turned(cellWidth, widest) {
  if (cellWidth >= widest + 8) return 0;
  return cellWidth < 17 ? Math.PI / 2 : Math.PI / 4;
}

/** Draws names, axes and bars; `mark` is the row and column that are pointed at. */
export function drawFrame(context, shown, place, colours, mark, held) {
  context.font = FONT;
  axes(context, shown, place, colours);
  rowNames(context, shown, place, colours, mark?.row, held);
  columnNames(context, shown, place, colours, mark?.col);
  if (shown.rowBars) rowBars(context, shown.rowBars, place, colours, mark?.row, held);
  if (shown.colBars) columnBars(context, shown.colBars, place, colours, mark?.col);
}

function axes(context, shown, { left, top, width, height }, { muted }) {
  context.fillStyle = muted;
  context.textAlign = "center";
  context.textBaseline = "middle";
  if (shown.colAxis) context.fillText(shown.colAxis, left + width / 2, 9);
  if (shown.rowAxis) {
    context.save();
    context.translate(9, top + height / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(shown.rowAxis, 0, 0);
    context.restore();
  }
}

function rowNames(context, shown, { left, top, cellHeight }, colours, at, held) {
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const [row, name] of names(shown.rowLabels, shown.rowTick, shown.rows, cellHeight, 26)) {
    emphasis(context, colours, row === held, row === at);
    context.fillText(
      name,
      left - 8,
      top + (row + 0.5) * cellHeight,
      left - (shown.rowAxis ? 30 : 10),
    );
  }
}

function columnNames(context, shown, { left, top, cellWidth, turn }, colours, at) {
  context.textBaseline = "middle";
  for (const [col, name] of names(shown.colLabels, shown.colTick, shown.cols, cellWidth, 40)) {
    emphasis(context, colours, false, col === at);
    const x = left + (col + 0.5) * cellWidth;
    context.save();
    context.translate(x, top - 10);
    context.rotate(-turn);
    context.textAlign = turn ? "left" : "center";
    context.fillText(name, 0, 0, 110);
    context.restore();
  }
}

/** Which rows or columns are named: all where words fit, or else some that are round numbers. */
function names(labels, name, count, size, apart) {
  const step = labels && size >= LEAST ? 1 : tick(apart / size);
  const some = [];
  for (let i = 0; i < count; i += step) some.push([i, labels ? labels[i] : name(i)]);
  return some;
}

/** The next of 1, 2, 5, 10, 20 ..., or of powers of two past those. */
function tick(least) {
  if (least <= 1) return 1;
  for (let step = 2; ; step *= 2) if (step >= least) return step;
}

function emphasis(context, { ink, muted, accent }, isHeld, isAt) {
  context.fillStyle = isHeld ? accent : isAt ? ink : muted;
  context.font = isHeld || isAt ? `600 ${FONT}` : FONT;
}

function rowBars(context, { values, label, most }, place, colours, at, held) {
  const { left, top, width, height, cellHeight, bars } = place;
  const x = left + width + 12;
  caption(context, colours, label, x + bars, 9, "right");
  const thick = thickness(cellHeight);
  values.forEach((value, row) => {
    const isMarked = row === held || row === at;
    const size = Math.max(most > 0 ? (bars * value) / most : 0, 0.5);
    const y = top + (row + 0.5) * cellHeight - thick / 2;
    const tip = isMarked || cellHeight >= THIN ? size : Math.min(size, TIP);
    context.fillStyle = colours.line;
    context.fillRect(x, y, size - tip, thick);
    context.fillStyle = row === held ? colours.accent : row === at ? colours.ink : colours.bar;
    context.fillRect(x + size - tip, y, tip, thick);
  });
  context.fillStyle = colours.line;
  context.fillRect(x - 1, top, 1, height);
}

function columnBars(context, { values, label, most }, place, colours, at) {
  const { left, top, width, height, cellWidth, bars } = place;
  const y = top + height + 12;
  const thick = thickness(cellWidth);
  values.forEach((value, col) => {
    const size = Math.max(most > 0 ? (bars * Math.abs(value)) / most : 0, 0.5);
    const x = left + (col + 0.5) * cellWidth - thick / 2;
    const tip = col === at || cellWidth >= THIN ? size : Math.min(size, TIP);
    context.fillStyle = colours.line;
    context.fillRect(x, y, thick, size - tip);
    context.fillStyle = col === at ? colours.ink : colours.bar;
    context.fillRect(x, y + size - tip, thick, tip);
  });
  context.fillStyle = colours.line;
  context.fillRect(left, y - 1, width, 1);
  caption(context, colours, label, left, y + bars + 13, "left");
}

/** How thick the bar of a cell is; bars that touch lie over one another, or seams would show. */
const thickness = (cell) => (cell < THIN ? cell + 0.7 : Math.min(cell * 0.7, THICK));

function caption(context, { muted }, label, x, y, align) {
  context.fillStyle = muted;
  context.font = FONT;
  context.textAlign = align;
  context.textBaseline = "middle";
  context.fillText(label, x, y);
}
