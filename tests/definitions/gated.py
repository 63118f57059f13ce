"""Gated and delta rules of one head by their definition, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np


def gated(
    query: Any, key: Any, value: Any, sums: Any, log_decay: Any = None, beta: Any = None, *,
    first: int, rule: str = "linear", scale: float | None = None, normalize_qk: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Returns the outputs: what each query reads of a matrix that the tokens up to it wrote.

    Beside each value the matrix holds a unit vector of the token, and one of its own first rows:
    what a query reads of them are the weights. `sums` are the matrix before the tokens. The first
    ones are the tail, which has no query.
    """
    (S, D), E, new = key.shape, value.shape[1], len(key) - first
    if normalize_qk:
        query, key = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (query, key))
    matrix = np.hstack([sums, np.zeros((D, new)), np.eye(D)])
    units, rows = np.vstack([np.zeros((first, new)), np.eye(new)]), []
    for t in range(S):
        if t == first:
            matrix[:, E + new :] = np.eye(D)
        if rule in ("gated", "gated_delta") and log_decay is not None:
            matrix = np.exp(log_decay[t] * np.ones(D))[:, None] * matrix
        written = np.concatenate([value[t], units[t], np.zeros(D)])
        if rule in ("delta", "gated_delta"):
            written = (1 if beta is None else beta[t]) * (written - key[t] @ matrix)
        matrix = matrix + np.outer(key[t], written)
        if t >= first:
            rows.append((D**-0.5 if scale is None else scale) * query[t - first] @ matrix)
    read = np.array(rows).reshape(new, E + new + D)
    output, weights, state_weights = np.split(read, [E, E + new], axis=1)
    return {"output": output, "weights": weights, "state_weights": state_weights}
