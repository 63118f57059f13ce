"""Linformer attention of one head by its definition."""

from __future__ import annotations

from typing import Any

import numpy as np


def linformer(
    query: Any, key: Any, value: Any, key_projection: Any, value_projection: Any, *,
    scale: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Returns the outputs: a softmax over mixtures of the keys."""
    s = query @ (key_projection @ key).T * (query.shape[1] ** -0.5 if scale is None else scale)
    p = np.exp(s - s.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    output = p @ (value_projection @ value)
    return {"output": output, "weights": p @ value_projection, "map": p}


def projection(stream: int, rank: int, length: int, seed: int) -> Any:
    """Returns a random projection: normal numbers of variance 1 / rank, key by key."""
    bits = np.random.Philox(key=np.array([seed, stream], np.uint64))
    return np.random.Generator(bits).standard_normal((length, rank)).T / np.sqrt(rank)
