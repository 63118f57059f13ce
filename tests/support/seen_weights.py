"""The weights of the keys that a row sees."""

from __future__ import annotations

from typing import Any

import numpy as np


def largest_weights(weights: Any, k: int | None = None) -> Any:
    """Returns the k largest weights of each row, or all, in descending order.

    A key that a row does not see has the weight 0. Those come last, also behind negative weights.
    """
    ordered = -np.sort(-np.where(weights == 0, -np.inf, weights), -1)[..., :k]
    return np.where(ordered == -np.inf, 0.0, ordered)
