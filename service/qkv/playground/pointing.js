// A pointer and the arrow keys on a matrix.

/**
 * Has a matrix say which cell is pointed at, and which row somebody wants held.
 *
 * @param {Object} matrix its surface, place, shown, mark and held
 * @param {{pointed: Function, held: Function}} to
 */
export function pointing(matrix, to) {
  const { surface } = matrix;
  const hold = (row) => to.held(row === matrix.held ? null : row);
  surface.addEventListener("pointermove", (event) => {
    const cell = cellAt(matrix, event);
    const same = cell?.row === matrix.mark?.row && cell?.col === matrix.mark?.col;
    if (!same) to.pointed(cell, false);
  });
  surface.addEventListener("pointerleave", () => {
    if (matrix.mark && document.activeElement !== surface) to.pointed(null, false);
  });
  surface.addEventListener("blur", () => to.pointed(null, false));
  surface.addEventListener("click", (event) => {
    const cell = cellAt(matrix, event);
    if (!cell) return;
    to.pointed(cell, false);
    hold(cell.row);
  });
  surface.addEventListener("keydown", (event) => {
    if (!matrix.shown || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = matrix.mark ?? { row: matrix.held ?? 0, col: 0 };
    if (event.key === "Enter" || event.key === " ") hold(at.row);
    else if (event.key === "Escape") to.held(null);
    else {
      const moved = move(
        event,
        matrix.mark ? at : { row: at.row, col: at.col - (event.key === "ArrowRight") },
        matrix.shown,
      );
      if (!moved) return;
      to.pointed(moved, true);
    }
    event.preventDefault();
  });
}

function move({ key, shiftKey }, { row, col }, { rows, cols }) {
  const far = shiftKey ? 10 : 1;
  const page = Math.max(1, Math.floor(rows / 8));
  const moved = {
    ArrowUp: [row - far, col],
    ArrowDown: [row + far, col],
    ArrowLeft: [row, col - far],
    ArrowRight: [row, col + far],
    PageUp: [row - page, col],
    PageDown: [row + page, col],
    Home: [row, 0],
    End: [row, cols - 1],
  }[key];
  if (!moved) return null;
  const within = (at, count) => Math.min(Math.max(at, 0), count - 1);
  return { row: within(moved[0], rows), col: within(moved[1], cols) };
}

function cellAt({ canvas, place, shown }, { clientX, clientY }) {
  if (!place) return null;
  const box = canvas.getBoundingClientRect();
  const col = Math.floor((clientX - box.left - place.left) / place.cellWidth);
  const row = Math.floor((clientY - box.top - place.top) / place.cellHeight);
  if (row < 0 || col < 0 || row >= shown.rows || col >= shown.cols) return null;
  return { row, col };
}
