"""Softmax attention of one head by its definition."""

from __future__ import annotations

from typing import Any

import numpy as np


def softmax(
    query: Any, key: Any, value: Any, mask: Any = None, alibi_slopes: float = 0.0,
    sinks: float = -np.inf, *, offset: int = 0, plane: int = 0, causal: bool = False,
    scale: float | None = None, softcap: float | None = None, window: Any = None,
    dropout: float = 0.0, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Returns the outputs: a softmax of each row of scores, and a logit that has no value."""
    (L, D), S = query.shape, len(key)
    s = query @ key.T * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    i, j = np.ogrid[offset : offset + L, :S]
    left, right = (np.inf if n is None else n for n in window or (None, None))
    hidden = (j < i - left) | (j > i + (0 if causal else right)) | (j > i + right)
    s = np.where(hidden, -np.inf, s + alibi_slopes * (j - i))
    top = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sinks)
    a = np.exp(s - np.where(np.isinf(top), 0, top)) if sinks < np.inf else 0 * np.exp(s)
    share = np.exp(sinks - np.where(np.isinf(top), 0, top)) if sinks < np.inf else 1
    a = a / np.maximum(a.sum(-1, keepdims=True) + share, np.finfo(float).tiny)
    if dropout:
        a = a * kept(dropout, seed, plane, L, S) / (1 - dropout)
    return {"output": a @ value, "weights": a, "scores": s}


def kept(dropout: float, seed: int, plane: int, L: int, S: int) -> Any:
    """Returns the pairs that dropout keeps: a hash of seed, head, row and key, in 32 bits."""

    def mix(x: Any) -> Any:
        x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
        return x ^ (x >> 16)

    low, high, head = (np.array([n], np.uint32) for n in (seed % 2**32, seed >> 32, plane))
    i, j = np.arange(L, dtype=np.uint32)[:, None], np.arange(S, dtype=np.uint32)
    u = mix(mix(mix(mix(mix(low) ^ high) ^ head) ^ i) ^ mix(~j))
    return u >= np.floor(dropout * 2.0**32)
