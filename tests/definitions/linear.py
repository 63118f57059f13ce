"""Linear attention of one head by its definition."""

from __future__ import annotations

from typing import Any

import numpy as np


def linear(
    query: Any, key: Any, value: Any, sums: Any, *, first: int, offset: int = 0,
    causal: bool = False, normalize: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Returns the outputs: products of phi(x) = elu(x) + 1, from logarithms, over their sum.

    `sums` are those of phi(k) (v, 1)^T over the tokens before the keys. The first keys are of the
    tail.
    """
    (L, _), S = query.shape, len(key)
    # the sum of two exponents rounds by its size: wider than float64, that is no error here
    query, key = query.astype(np.longdouble), key.astype(np.longdouble)
    q, k = (np.where(x > 0, np.log1p(np.maximum(x, 0)), x) for x in (query, key))
    terms = q[:, None] + k
    if causal:
        seen = np.arange(S) <= np.arange(L)[:, None] + first + offset
        terms = np.where(seen[..., None], terms, -np.inf)
    top = np.maximum(terms.max((1, 2), initial=-np.inf), q.max(1) if sums.any() else -np.inf)
    top = np.where(np.isinf(top) | (not normalize), 0, top)[:, None]
    a = np.exp(terms - top[..., None]).sum(-1)
    shared = np.exp(q - top) @ sums
    total = a.sum(1, keepdims=True) + shared[:, -1:]
    if normalize:
        a, shared = (x / np.where(total == 0, 1, total) for x in (a, shared))
    found = {"output": a @ value + shared[:, :-1], "weights": a[:, first:]}
    return {name: x.astype(np.float64) for name, x in found.items()}
