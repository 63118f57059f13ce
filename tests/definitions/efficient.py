"""Efficient attention of one head by its definition."""

from __future__ import annotations

from typing import Any

import numpy as np


def efficient(
    query: Any, key: Any, value: Any, sums: Any, largest: Any, *, first: int, offset: int = 0,
    causal: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Returns the outputs: a softmax over channels times a softmax over positions, row by row.

    `sums` are those of e^(k - largest) (v, 1)^T over the tokens before the keys. The first keys are
    of the tail.
    """
    (L, _), S = query.shape, len(key)
    before = np.where(sums[:, -1] == 0, -np.inf, largest)
    weights, output = np.zeros((L, S)), np.zeros((L, value.shape[1]))
    for i, row in enumerate(query):
        n = first + (min(S - first, max(0, i + offset + 1)) if causal else S - first)
        if n == 0:
            continue
        p = np.exp(row - row.max())
        top = np.maximum(key[:n].max(0), before)
        a, shared = np.exp(key[:n] - top), np.exp(before - top)[:, None] * sums
        p = p / p.sum() / (a.sum(0) + shared[:, -1])
        weights[i, :n] = a @ p
        output[i] = (a @ p) @ value[:n] + p @ shared[:, :-1]
    return {"output": output, "weights": weights[:, first:]}
