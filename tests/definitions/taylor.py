"""Taylor attention of one head by its definition."""

from __future__ import annotations

from typing import Any

import numpy as np


def taylor(
    query: Any, key: Any, value: Any, sums: Any, *, first: int, offset: int = 0,
    causal: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Returns the outputs: 1 + q' . k' = |q' + k'|^2 / 2 over its sum, row by row.

    `sums` are those of (1, k') (v, 1)^T over the tokens before the keys. The first keys are of the
    tail.
    """
    D, keys, L = key.shape[1], _direction(key), len(query)
    weights, output = np.zeros((L, len(key))), np.zeros((L, value.shape[1]))
    for i, row in enumerate(_direction(query)):
        apart = np.sqrt(((row + keys) ** 2).sum(-1))
        apart[apart <= (D + 4) * np.finfo(float).eps] = 0  # opposed, apart from rounding
        a = apart**2 / 2
        a[(keys == 0).all(-1) | (row == 0).all()] = 1
        if causal:
            a[max(0, first + i + offset + 1) :] = 0
        shared = sums[0] + row @ sums[1:]
        total = a.sum() + shared[-1] or 1
        weights[i], output[i] = a / total, (a / total) @ value + shared[:-1] / total
    return {"output": output, "weights": weights[:, first:]}


def _direction(x: Any) -> Any:
    """Returns x / |x|; 0 for a vector of norm 0."""
    largest = np.abs(x).max(-1, keepdims=True)
    x = x / np.where(largest == 0, 1, largest)
    return x / np.where(largest == 0, 1, np.linalg.norm(x, axis=-1, keepdims=True))
