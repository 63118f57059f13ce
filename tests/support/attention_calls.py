"""Captured calls with random tensors, and the figures of one head by their definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from definitions.linear import linear
from definitions.softmax import softmax
from qkv.models.attention_call import AttentionCall
from qkv.models.calls import Calls


def make_call(
    layer: str = "layer.0",
    *,
    B: int = 1,
    H: int = 2,
    G: int | None = None,
    L: int = 5,
    S: int | None = None,
    D: int = 4,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> AttentionCall:
    """Returns a call with random tensors; the output is zero, because no test here reads it."""
    G, S = H if G is None else G, L if S is None else S
    fields: dict[str, Any] = {
        "mask": None, "causal": False, "query_offset": 0, "scale": D**-0.5, "softcap": None,
        "window": None, "sinks": None, "heads": tuple(range(H)), "items": tuple(range(B)),
    }  # fmt: skip
    return AttentionCall(
        index=0,
        layer=layer,
        query=torch.randn(B, H, L, D, dtype=dtype),
        key=torch.randn(B, G, S, D, dtype=dtype),
        value=torch.randn(B, G, S, D, dtype=dtype),
        output=torch.zeros(B, H, L, D, dtype=dtype),
        **(fields | options),
    )


def calls_of(*calls: AttentionCall) -> Calls:
    """Returns a capture of these calls."""
    found = Calls()
    for call in calls:
        found.append(call)
    return found


def padding_mask(lengths: Sequence[int], S: int, *, left: bool = False) -> Tensor:
    """Returns a mask (B, 1, S, S) that hides the padding of sequences of these lengths."""
    position_S = torch.arange(S)
    rows = [position_S >= S - n if left else position_S < n for n in lengths]
    return torch.stack(rows)[:, None, None].expand(-1, -1, S, -1)


def weights_of_head(
    variant: str, query: Tensor, key: Tensor, visible: Tensor, scale: float
) -> np.ndarray:
    """Returns the weights (L, S) of one head of softmax or linear attention, by its definition.

    Args:
        variant: its name.
        query: (L, D).
        key: (S, D).
        visible: (L, S), true where a query may attend; for linear attention all, or causal.
        scale: of the scores of softmax.
    """
    q, k = query.numpy(), key.numpy()
    if variant == "softmax":
        found = softmax(q, k, k, visible.numpy(), scale=scale)
    else:
        nothing = np.zeros((k.shape[1], k.shape[1] + 1))
        found = linear(q, k, k, nothing, first=0, causal=not visible.all())
    weights: np.ndarray = found["weights"]
    return weights


def head_figures(a: np.ndarray, b: np.ndarray, value: np.ndarray) -> dict[str, float]:
    """Returns the figures of one head: rows of the baseline a and of a variant b.

    Every weight that a hides is 0 in b too.
    """
    x, y = b @ value, a @ value
    middle = (a + b) / 2
    return {
        "relative_error": float(np.linalg.norm(x - y) / np.linalg.norm(y)),
        "largest_error": float(abs(x - y).max()),
        "cosine": float((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y)),
        "total_variation": float(abs(a - b).sum(1).mean() / 2),
        "kl_divergence": float(_kl(a, b).mean()),
        "js_divergence": float((_kl(a, middle) + _kl(b, middle)).mean() / 2),
        "entropy": float(_entropy(b).mean()),
        "baseline_entropy": float(_entropy(a).mean()),
    }


def _kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    found: np.ndarray = (a * np.log(np.where(a > 0, a, 1) / np.where(b > 0, b, 1))).sum(1)
    return found


def _entropy(a: np.ndarray) -> np.ndarray:
    found: np.ndarray = -(a * np.log(np.where(a > 0, a, 1))).sum(1)
    return found
