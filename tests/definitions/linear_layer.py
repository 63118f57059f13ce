"""A linear layer as attention, of one item, by its definition."""

from __future__ import annotations

from typing import Any

import numpy as np


def linear_layer(x: Any, weight: Any) -> dict[str, Any]:
    """Returns the outputs: the shares of |x|, and the columns of W times sign and sum."""
    size = np.abs(x)
    largest = size.max(initial=0.0) or 1.0
    share = size / largest
    total = share.sum() or 1.0
    with np.errstate(divide="ignore", over="ignore"):  # log 0 is -inf
        value = np.sign(x)[:, None] * weight.T * largest * total
        scores, key = np.log(size) - np.log(largest) - np.log(total), np.log(size)[:, None]
    return {
        "output": weight @ x, "weights": share / total, "value": value, "scores": scores,
        "query": np.ones(1), "key": key,
    }  # fmt: skip
