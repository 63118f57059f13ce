"""The weights of a run, in whatever form they came, as panels of a heat map: one for each head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from qkv.heatmap import Panel

__all__ = ["Picture", "picture"]

Form: TypeAlias = str | Mapping[str, Any]

_MOST: Final = 16  # panels
_MOST_ROWS: Final = 32  # heads in a panel of statistics
# up to so many panels each is so many pixels wide, and at most so many cells: 16,384 cells in all
# are some 200 KB
_SIZES: Final = ((1, 360, 120), (4, 208, 64), (_MOST, 160, 32))
_STATISTICS: Final = {
    "entropy": ("entropy, nats", "query"),
    "largest": ("largest weight", "query"),
    "effective_keys": ("effective keys", "query"),
    "received": ("received by a key", "key"),
}
_SHADES: Final = "Shades go from 0 to the panel's largest number, by the root."
_SIGNED: Final = f"{_SHADES} Below 0 is orange."


class Picture(NamedTuple):
    """What is to be drawn.

    Attributes:
        panels: at least one.
        columns: of panels.
        side: of a panel, in pixels.
        caption: sentences on what is seen.
    """

    panels: Sequence[Panel]
    columns: int
    side: int
    caption: str


def picture(arrays: Mapping[str, np.ndarray], form: Form) -> Picture | None:
    """Of the outputs of a run whose weights were asked for in this form; None where there are none.

    Whatever is too large is pooled: keys side by side are one by their sum, queries by their mean.
    What is left over at an edge counts as if it were as many as the rest.
    """
    if "entropy" in arrays:
        return _statistics(arrays)
    weights, indices = arrays.get("weights"), arrays.get("indices")
    if weights is None or weights.ndim < 2 or not weights.size:
        return None
    planes, kind, said = _planes(weights, 2, _MOST)
    rows, columns = weights.shape[-2:]
    if indices is not None:
        said.append(f"Of each query the {columns:,} largest are there.")
        columns = int(indices.max()) + 1
    side, cells = next((s, c) for most, s, c in _SIZES if len(planes) <= most)
    tall, wide = math.ceil(rows / cells), math.ceil(columns / cells)
    if indices is None:
        matrices = [_pooled(plane, tall, wide) for plane in planes]
    else:
        named = _planes(indices, 2, _MOST)[0]
        matrices = [
            _placed(plane, at, columns, tall, wide) for plane, at in zip(planes, named, strict=True)
        ]
    row_axis, column_axis = _axes(form, rows, columns)
    panels = [
        Panel(f"{kind} {n}" if len(planes) > 1 else "", matrix, row_axis, column_axis)
        for n, matrix in enumerate(matrices)
    ]
    if tall * wide > 1:
        said.append(
            f"A cell is {_so_many(tall, 'query', 'queries')} by {_so_many(wide, 'key', 'keys')}: "
            "what those keys get together, on average of those queries."
        )
    if not np.isfinite(weights).all():
        said.append("What is not finite is left out.")
    said.append(_SIGNED if any((matrix < 0).any() for matrix in matrices) else _SHADES)
    return Picture(panels, 4, side, " ".join(said))


def _statistics(arrays: Mapping[str, np.ndarray]) -> Picture:
    """A panel for each statistic, a row for each head."""
    side, cells = _SIZES[1][1:]
    panels: list[Panel] = []
    said: list[str] = []
    means = {}
    for name, (title, axis) in _STATISTICS.items():
        rows, kind, said = _planes(arrays[name], 1, _MOST_ROWS)
        count = rows.shape[-1]
        wide = math.ceil(count / cells)
        panels.append(Panel(title, _pooled(rows, 1, wide) / wide, kind, _span(axis, count)))
        means[axis] = wide
    if max(means.values()) > 1:
        queries = _so_many(means["query"], "query", "queries")
        said.append(
            f"A cell is the mean of {queries}, or of {_so_many(means['key'], 'key', 'keys')}."
        )
    return Picture(panels, 2, side, " ".join([*said, _SHADES]))


def _planes(array: np.ndarray, rank: int, most: int) -> tuple[np.ndarray, str, list[str]]:
    """The first so many of what has this rank, what each of them is, and what is left out."""
    said = []
    kind = "head" if array.ndim - rank > 1 else "sequence"
    if kind == "head":
        if len(array) > 1:
            said.append(f"The first of {len(array):,} sequences.")
        array = array[0]
    planes = array.reshape(-1, *array.shape[array.ndim - rank :])
    if len(planes) > most:
        said.append(f"The first {most} of {len(planes):,} {kind}s.")
    return planes[:most], kind, said


def _pooled(plane: np.ndarray, tall: int, wide: int) -> np.ndarray:
    """So many columns by their sum, and so many rows by their mean."""
    rows, columns = plane.shape
    finite = np.where(np.isfinite(plane), plane, 0)
    with np.errstate(over="ignore"):
        summed = np.add.reduceat(finite, np.arange(0, columns, wide), axis=1, dtype=np.float64)
        total = np.add.reduceat(summed, np.arange(0, rows, tall), axis=0)
    return _evened(total, rows, columns, tall, wide)


def _placed(
    plane: np.ndarray, indices: np.ndarray, columns: int, tall: int, wide: int
) -> np.ndarray:
    """The same of weights that stand at some indices only."""
    rows = len(plane)
    total = np.zeros((math.ceil(rows / tall), math.ceil(columns / wide)))
    row = np.broadcast_to(np.arange(rows)[:, None] // tall, plane.shape)
    there = (indices >= 0) & np.isfinite(plane)
    np.add.at(total, (row[there], indices[there] // wide), plane[there])
    return _evened(total, rows, columns, tall, wide)


def _evened(total: np.ndarray, rows: int, columns: int, tall: int, wide: int) -> np.ndarray:
    """Sums of cells as if those at the edges held as many columns as all others."""
    held_R1, held_1C = (
        np.diff([*range(0, size, step), size]) for size, step in ((rows, tall), (columns, wide))
    )
    even: np.ndarray = np.nan_to_num(total) / held_R1[:, None] * (wide / held_1C)
    return even


def _axes(form: Form, rows: int, columns: int) -> tuple[str, str]:
    """What rows and columns are."""
    if isinstance(form, Mapping) and "pool" in form:
        return _span("bin of queries", rows), _span("bin of keys", columns)
    if isinstance(form, Mapping) and "rows" in form:
        asked = [f"{row:,}" for row in form["rows"]]
        row_axis = f"query {', '.join(asked)}" if len(asked) <= 4 else f"{rows:,} queries, as asked"
        return row_axis, _span("key", columns)
    return _span("query", rows), _span("key", columns)


def _span(what: str, count: int) -> str:
    return f"{what} 0 to {count - 1:,}" if count > 1 else f"{what} 0"


def _so_many(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"
