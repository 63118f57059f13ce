"""Mean attention of one head by its definition."""

from __future__ import annotations

from typing import Any

import numpy as np


def mean(
    value: Any, sums: Any, *, L: int, first: int, causal: bool = True, normalize: bool = True
) -> dict[str, Any]:
    """Returns the outputs: the average of the values up to each row, or of all.

    `sums` are those of (v, 1) over the tokens before the values. The first values are of the tail.
    """
    a = np.ones((L, len(value)))
    if causal:
        a = np.tril(a, first)
    total = np.maximum(a.sum(1, keepdims=True) + sums[:, -1:], 1) if normalize else 1.0
    a, shared = a / total, sums / total
    return {"output": a @ value + shared[:, :-1], "weights": a[:, first:]}
