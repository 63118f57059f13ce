"""Sigmoid attention of one head by its definition."""

from __future__ import annotations

from typing import Any

import numpy as np


def sigmoid(
    query: Any, key: Any, value: Any, mask: Any = None, alibi_slopes: float = 0.0, *,
    offset: int = 0, causal: bool = False, scale: float | None = None, bias: float | None = None,
    softcap: float | None = None, window: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Returns the outputs: a sigmoid of each score."""
    (L, D), S = query.shape, len(key)
    s = query @ key.T * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    s = s + (-np.log(max(1, S)) if bias is None else bias)
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    i, j = np.ogrid[offset : offset + L, :S]
    left, right = (np.inf if n is None else n for n in window or (None, None))
    hidden = (j < i - left) | (j > i + (0 if causal else right)) | (j > i + right)
    s = np.where(hidden, -np.inf, s + alibi_slopes * (j - i))
    fallen = np.exp(-np.abs(s))  # e^-s would overflow
    a = np.where(s > 0, 1, fallen) / (1 + fallen)
    return {"output": a @ value, "weights": a, "scores": s}
