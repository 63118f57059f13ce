"""Pools matrices that are too large: a cell is a sum over keys and a mean over queries."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["pool", "pool_indexed"]


def pool(plane: np.ndarray, tall: int, wide: int) -> np.ndarray:
    """Returns cells of `tall` rows, by their mean, and `wide` columns, by their sum.

    A smaller cell at an edge is scaled to the size of the others. Numbers that are not finite
    count as 0.

    Args:
        plane: (rows, columns).
        tall, wide: rows and columns of a cell.
    """
    rows, columns = plane.shape
    finite = np.where(np.isfinite(plane), plane, 0)
    with np.errstate(over="ignore"):
        summed = np.add.reduceat(finite, np.arange(0, columns, wide), axis=1, dtype=np.float64)
        total = np.add.reduceat(summed, np.arange(0, rows, tall), axis=0)
    return _scale_edges(total, rows, columns, tall, wide)


def pool_indexed(
    plane: np.ndarray, indices: np.ndarray, columns: int, tall: int, wide: int
) -> np.ndarray:
    """Does the same for weights that are given at some indices only.

    Args:
        plane: (rows, K).
        indices: (rows, K), the column of each weight; negative: none.
        columns: of the whole matrix.
        tall, wide: rows and columns of a cell.
    """
    rows = len(plane)
    total = np.zeros((math.ceil(rows / tall), math.ceil(columns / wide)))
    row = np.broadcast_to(np.arange(rows)[:, None] // tall, plane.shape)
    valid = (indices >= 0) & np.isfinite(plane)
    np.add.at(total, (row[valid], indices[valid] // wide), plane[valid])
    return _scale_edges(total, rows, columns, tall, wide)


def _scale_edges(total: np.ndarray, rows: int, columns: int, tall: int, wide: int) -> np.ndarray:
    """Returns the means over rows, with edge cells scaled to `wide` columns."""
    size_R1, size_1C = (
        np.diff([*range(0, size, step), size]) for size, step in ((rows, tall), (columns, wide))
    )
    even: np.ndarray = np.nan_to_num(total) / size_R1[:, None] * (wide / size_1C)
    return even
